"""AutoAWQ's layout gemm; see `quantize/checkpoints/awq.py` for the tensors. Zero points are always stored."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmc.quantize.export.base import Layout, Tensors, has_whole_groups, integers_of, tensor, zero_points
from llmc.quantize.export.bits import pack
from llmc.quantize.formats.base import Quantized, QuantizeError, WeightFormat
from llmc.quantize.formats.integers import Integers

_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_UNIT = 32


class Awq(Layout):
    name = "awq"

    def check(self) -> None:
        if integers_of(self.name, self.wanted).bits != 4:
            raise QuantizeError("--format awq holds numbers of 4 bits alone; use --scheme w4a16 or another format")

    @property
    def scale_dtype(self) -> str:
        return "f16"

    def format_of(self, n: int, k: int, format: WeightFormat) -> WeightFormat | None:
        return format if has_whole_groups(k, format) and k % _UNIT == 0 and n % _UNIT == 0 else None

    def tensors(self, prefix: str, quantized: Quantized, matrices: int = 1) -> Tensors:
        format = quantized.format
        assert isinstance(format, Integers)
        found = {
            "qweight": tensor(_interleaved(quantized.numbers.T), "I32"),
            "qzeros": tensor(_interleaved(zero_points(quantized, format).T), "I32"),
            "scales": tensor(quantized.scale.T.astype(np.float16), "F16"),
        }
        return {f"{prefix}.{leaf}": value for leaf, value in found.items()}

    def settings(self, formats: Mapping[str, WeightFormat], left: Collection[str]) -> dict[str, Any]:
        return {
            "quant_method": self.name,
            "bits": self.wanted.format.bits,
            "group_size": self.wanted.format.group_size,
            "zero_point": True,
            "version": "gemm",
            "modules_to_not_convert": sorted(left),
        }


def _interleaved(numbers: NDArray[np.uint8]) -> NDArray[np.int32]:
    """Packs eight numbers a word along the last axis, in the layout's order."""
    eights = numbers.reshape(*numbers.shape[:-1], -1, 8)[..., _ORDER]
    return pack(np.ascontiguousarray(eights).reshape(numbers.shape), 4)
