"""What an exported layout is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmc.quantize.checkpoints import StoredTensor
from llmc.quantize.formats.base import WHOLE_ROW, Quantized, QuantizeError
from llmc.quantize.formats.integers import ZERO, Integers

Tensors = dict[str, StoredTensor]


@dataclass(frozen=True)
class Wanted:
    """How all layers of a model are quantized. act_bits: 16, or 8 for inputs that are rounded to int8, by token.

    scale_dtype: what the checkpoint's other weights are stored in: f32, f16 or bf16.
    """

    format: Integers
    act_bits: int
    scale_dtype: str


class Layout(ABC):
    """A way to store a quantized model. Raises QuantizeError for what it does not hold."""

    name: str

    def __init__(self, wanted: Wanted) -> None:
        self.wanted = wanted
        self.check()

    @abstractmethod
    def check(self) -> None:
        """Raises QuantizeError when the layout does not hold what is wanted."""

    @property
    @abstractmethod
    def scale_dtype(self) -> str:
        """What scales are stored in."""

    @abstractmethod
    def format_of(self, n: int, k: int) -> Integers | None:
        """The format of a matrix [n, k]; None: it stays as it is."""

    @abstractmethod
    def tensors(self, prefix: str, quantized: Quantized) -> Tensors:
        """The tensors of the linear layer `prefix`, by their names in the checkpoint."""

    @abstractmethod
    def settings(self, formats: Mapping[str, Integers], left: Collection[str]) -> dict[str, Any]:
        """quantization_config of config.json. formats: of the quantized layers by prefix; left: other linear layers."""


def has_whole_groups(k: int, format: Integers) -> bool:
    return format.group_size == WHOLE_ROW or k % format.group_size == 0


def tensor(array: NDArray[Any], dtype: str) -> StoredTensor:
    return StoredTensor.of(np.ascontiguousarray(array), dtype)


def zero_points(quantized: Quantized, format: Integers) -> NDArray[np.uint8]:
    """[N, G], also of a symmetric format."""
    if format.asymmetric:
        zero: NDArray[np.uint8] = quantized.planes[ZERO]
        return zero
    return np.full(quantized.scale.shape, format.middle, np.uint8)


def check_plain_inputs(name: str, wanted: Wanted) -> None:
    if wanted.act_bits != 16:
        raise QuantizeError(
            f"--format {name} holds no rounded activations; use --scheme w4a16 or --format compressed-tensors"
        )
