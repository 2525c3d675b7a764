"""8-bit floats, OCP E4M3 without infinities: value = float · scale."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from llmc.quantize.formats.base import (
    SCALE,
    WHOLE_ROW,
    Plane,
    Quantized,
    WeightFormat,
    check_finite,
    in_groups,
    inverse_of,
)
from llmc.quantize.formats.scheme import Scheme

LARGEST = 448
_LARGEST_CODE = 0x7E
_MANTISSA = 23 - 3
"""Mantissa bits of float32 beyond those of E4M3."""
_LEAST_NORMAL = 127 - 6
"""The float32 exponent of the smallest normal E4M3 number; smaller numbers are multiples of 2⁻⁹."""
_REBIAS = (127 - 7) << 3


def _values() -> NDArray[np.float32]:
    """Values of all codes. The exponent bias is 7; NaN has all bits below the sign set."""
    code = np.arange(256)
    exponent, mantissa = (code >> 3) & 15, (code & 7).astype(np.float64)
    normal = np.ldexp(1 + mantissa / 8, exponent - 7)
    value = np.where(exponent == 0, np.ldexp(mantissa / 8, -6), normal)
    value[(code & 127) == 127] = np.nan
    return np.where(code < 128, value, -value).astype(np.float32)


VALUES = _values()
"""The value of each byte."""


@dataclass(frozen=True)
class Fp8(WeightFormat):
    group_size: int = WHOLE_ROW
    kind: ClassVar[str] = "fp8"
    bits: ClassVar[int] = 8  # type: ignore[misc]

    def planes(self, k: int) -> tuple[Plane, ...]:
        return (Plane(SCALE, "f32", self.groups(k)),)

    def value(self, quantized: Quantized) -> NDArray[np.float64]:
        scale = quantized.scale[:, self.group_of(quantized.numbers.shape[1])]
        wide: NDArray[np.float64] = np.take(VALUES, quantized.numbers).astype(np.float64) * scale
        return wide

    def quantize_rows(self, weight: NDArray[np.float32], out: Quantized) -> None:
        for elements, groups, width in in_groups(weight.shape[1], self.group_size):
            some, scale = weight[:, elements].reshape(len(weight), -1, width), out.scale[:, groups]
            np.divide(np.abs(some).max(-1), np.float32(LARGEST), out=scale)
            check_finite(scale)
            some *= inverse_of(scale)[..., None]
            out.numbers[:, elements] = nearest(some).reshape(len(weight), -1)


def nearest(values: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Codes of the nearest numbers, ties to even; values out of range saturate."""
    bits = values.view(np.uint32)
    magnitude = bits & np.uint32(0x7FFFFFFF)
    half = np.uint32((1 << (_MANTISSA - 1)) - 1) + (magnitude >> np.uint32(_MANTISSA) & np.uint32(1))
    normal = np.minimum(((magnitude + half) >> np.uint32(_MANTISSA)) - np.uint32(_REBIAS), np.uint32(_LARGEST_CODE))
    small = np.rint(np.minimum(np.abs(values), np.float32(1)) * np.float32(512)).astype(np.uint32)
    code = np.where(magnitude < np.uint32(_LEAST_NORMAL << 23), small, normal)
    signed: NDArray[np.uint8] = (code | (bits >> np.uint32(31)) << np.uint32(7)).astype(np.uint8)
    return signed


SCHEMES = (Scheme("fp8", Fp8(), 16, head="w8a16"),)
