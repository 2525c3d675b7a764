"""The interface of an exported layout."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from llmc.quantize.checkpoints import StoredTensor
from llmc.quantize.formats.base import WHOLE_ROW, Quantized, QuantizeError, WeightFormat
from llmc.quantize.formats.integers import ZERO, Integers
from llmc.quantize.formats.steps import Steps
from llmc.quantize.recipe import QuantConfig

Tensors = dict[str, StoredTensor]


@dataclass(frozen=True)
class Wanted:
    """How a model's layers are to be quantized.

    format: of layers to which no recipe gives another.
    act_bits: 16, or 8 for inputs rounded to int8 per token.
    scale_dtype: dtype of the checkpoint's other weights: f32, f16 or bf16.
    """

    format: WeightFormat
    act_bits: int
    scale_dtype: str


class Layout(ABC):
    """A way to store a quantized model. Raises QuantizeError for a request that it cannot represent.

    stacks: end of the names of its tensors, if each holds a matrix of every expert; then other layers stay as they are.
    """

    name: str
    stacks: ClassVar[str] = ""

    def __init__(self, wanted: Wanted) -> None:
        self.wanted = wanted
        self.check()

    @abstractmethod
    def check(self) -> None:
        """Raises QuantizeError if the layout cannot represent the request."""

    @classmethod
    def format_for(cls, quant: QuantConfig) -> WeightFormat:
        """The weight format of a scheme in this layout. The steps of w4a8 become group scales, which checkpoints can
        hold."""
        weight = quant.layers.weight
        return Integers(4, weight.group_size, weight.asymmetric) if isinstance(weight, Steps) else weight

    @property
    def packs(self) -> bool:
        """Whether the numbers of a layer have another name than `weight`, which loaders of families with transposed
        matrices would transpose."""
        return True

    @property
    @abstractmethod
    def scale_dtype(self) -> str:
        """The dtype in which scales are stored."""

    @abstractmethod
    def format_of(self, n: int, k: int, format: WeightFormat) -> WeightFormat | None:
        """The format to use for a matrix [n, k] that should have `format`; None to leave it unquantized."""

    @abstractmethod
    def tensors(self, prefix: str, quantized: Quantized, matrices: int = 1) -> Tensors:
        """The tensors of linear layer `prefix`, by their names in the checkpoint. matrices: equal blocks of rows of a
        layout with `stacks`."""

    @abstractmethod
    def settings(self, formats: Mapping[str, WeightFormat], left: Collection[str]) -> dict[str, Any]:
        """The quantization_config for config.json. formats: of quantized layers, by prefix. left: prefixes of the other
        linear layers."""


def has_whole_groups(k: int, format: WeightFormat) -> bool:
    return format.group_size == WHOLE_ROW or k % format.group_size == 0


def tensor(array: NDArray[Any], dtype: str) -> StoredTensor:
    return StoredTensor.of(np.ascontiguousarray(array), dtype)


def zero_points(quantized: Quantized, format: Integers) -> NDArray[np.uint8]:
    """Zero points [N, G], also for a symmetric format."""
    if format.asymmetric:
        zero: NDArray[np.uint8] = quantized.planes[ZERO]
        return zero
    return np.full(quantized.scale.shape, format.middle, np.uint8)


def integers_of(name: str, wanted: Wanted) -> Integers:
    """The requested format, for a layout that only supports integers. Raises QuantizeError."""
    if not isinstance(wanted.format, Integers):
        raise QuantizeError(f"--format {name} holds integers alone; use --format compressed-tensors")
    if wanted.act_bits != 16:
        raise QuantizeError(
            f"--format {name} holds no rounded activations; use --scheme w4a16 or --format compressed-tensors"
        )
    return wanted.format
