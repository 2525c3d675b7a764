"""The blocks of GGUF, the format of llama.cpp: 32 numbers and what they share, side by side. Halves are little-endian.

| type | block | value |
|---|---|---|
| Q8_0 | scale (half), 32 int8 | n * scale |
| Q4_0 | scale (half), 16 bytes | (n - 8) * scale |
| Q4_1 | scale, minimum (halves), 16 bytes | n * scale + minimum |
| MXFP4 | power (byte), 16 bytes of E2M1 | n * 2^(power - 127) |

A byte holds numbers i and i + 16 of its block. Tensor names and row order are those of transformers; the writer of the
file renames them for llama.cpp.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmc.quantize.export.base import Layout, Tensors, has_whole_groups, tensor
from llmc.quantize.formats.affine import OFFSET, Affine
from llmc.quantize.formats.base import SCALE, Quantized, QuantizeError, WeightFormat
from llmc.quantize.formats.codes import E8M0, Codes
from llmc.quantize.formats.integers import Integers
from llmc.quantize.recipe import QuantConfig

BLOCK = 32
TYPES: dict[WeightFormat, str] = {
    Integers(8, BLOCK): "Q8_0",
    Integers(4, BLOCK): "Q4_0",
    Affine(4, BLOCK, BLOCK): "Q4_1",
    Codes("e2m1", BLOCK, E8M0): "MXFP4",
}


class Gguf(Layout):
    """Supports w8a16, w8a8, w4a16, w4a8 and mxfp4. A GGUF file does not record how inputs are rounded."""

    name = "gguf"

    @classmethod
    def format_for(cls, quant: QuantConfig) -> WeightFormat:
        weight = quant.layers.weight
        if quant.scheme in ("w8a16", "w8a8"):
            return Integers(8, BLOCK)
        if quant.scheme in ("w4a16", "w4a8"):
            if quant.group_size not in (None, BLOCK):
                raise QuantizeError(
                    f"--format gguf has groups of {BLOCK}, not of {quant.group_size}; leave --group-size out"
                )
            return Affine(4, BLOCK, BLOCK) if getattr(weight, "asymmetric", False) else Integers(4, BLOCK)
        return weight

    def check(self) -> None:
        if self.wanted.format not in TYPES:
            raise QuantizeError("--format gguf holds w8a16, w8a8, w4a16, w4a8 and mxfp4; use one of these schemes")

    @property
    def scale_dtype(self) -> str:
        return "f16"

    def format_of(self, n: int, k: int, format: WeightFormat) -> WeightFormat | None:
        return format if has_whole_groups(k, format) else None

    def tensors(self, prefix: str, quantized: Quantized, matrices: int = 1) -> Tensors:
        rows = len(quantized.numbers)
        numbers = quantized.numbers.reshape(rows, -1, BLOCK)
        scale = quantized.planes[SCALE][..., None]
        match TYPES[quantized.format]:
            case "Q8_0":
                parts = [_halves(scale), numbers ^ np.uint8(128)]  # from unsigned to two's complement
            case "Q4_0":
                parts = [_halves(scale), _pairs(numbers)]
            case "Q4_1":
                parts = [_halves(scale), _halves(-quantized.planes[OFFSET][..., None]), _pairs(numbers)]
            case _:
                parts = [scale, _pairs(numbers)]
        return {f"{prefix}.weight": tensor(np.concatenate(parts, axis=-1).reshape(rows, -1), "U8")}

    def settings(self, formats: Mapping[str, WeightFormat], left: Collection[str]) -> dict[str, Any]:
        """The type of each quantized layer."""
        return {prefix: TYPES[format] for prefix, format in formats.items()}


def _halves(values: NDArray[np.float32]) -> NDArray[np.uint8]:
    """The bytes of values exact in half precision: [..., 1] becomes [..., 2]."""
    return np.ascontiguousarray(values.astype("<f2")).view(np.uint8)


def _pairs(numbers: NDArray[np.uint8]) -> NDArray[np.uint8]:
    half = BLOCK // 2
    return numbers[..., :half] | (numbers[..., half:] << np.uint8(4))
