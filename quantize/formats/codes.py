"""4-bit codes that index a table (`tables.py`): value = table[code] · scale.

A group's scale is a float32, or, in MXFP4, a power of two in a byte (E8M0): 2^(byte − 127). The two scales of NVFP4 are
multiplied into one float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from llmc.quantize.formats.base import FLOAT, SCALE, Plane, Quantized, WeightFormat, check_finite, in_groups, inverse_of
from llmc.quantize.formats.scheme import Scheme
from llmc.quantize.formats.tables import TABLES, nearest, wanted_scale

E8M0 = "e8m0"
_BIAS = 127
MOST_POWER = 254
"""Largest stored power; 255 is NaN."""


@dataclass(frozen=True)
class Codes(WeightFormat):
    """table: name in `TABLES`. scale_kind: "f32", "f16" or "e8m0"."""

    table: str
    group_size: int
    scale_kind: str = FLOAT
    kind: ClassVar[str] = "codes"
    bits: ClassVar[int] = 4  # type: ignore[misc]

    @property
    def values(self) -> NDArray[np.float32]:
        return TABLES[self.table]

    def planes(self, k: int) -> tuple[Plane, ...]:
        return (Plane(SCALE, "u8" if self.scale_kind == E8M0 else self.scale_kind, self.groups(k)),)

    def resembles(self, other: WeightFormat) -> bool:
        """Whether `other` has this table, possibly with steps under block scales."""
        powers = getattr(other, "scale_kind", FLOAT) == E8M0
        return (getattr(other, "table", None), powers) == (self.table, self.scale_kind == E8M0)

    def describe(self) -> str:
        return f"{super().describe()}{' that share a power of two' if self.scale_kind == E8M0 else ''}"

    def value(self, quantized: Quantized) -> NDArray[np.float64]:
        scale = quantized.planes[SCALE]
        wide = np.ldexp(1.0, scale.astype(np.int32) - _BIAS) if self.scale_kind == E8M0 else scale.astype(np.float64)
        group = self.group_of(quantized.numbers.shape[1])
        found: NDArray[np.float64] = np.take(self.values, quantized.numbers).astype(np.float64) * wide[:, group]
        return found

    def quantize_rows(self, weight: NDArray[np.float32], out: Quantized) -> None:
        for elements, groups, width in in_groups(weight.shape[1], self.group_size):
            some = weight[:, elements].reshape(len(weight), -1, width)
            some *= self._scale(some.min(-1), some.max(-1), out.planes[SCALE][:, groups])[..., None]
            out.numbers[:, elements] = nearest(self.table, some).reshape(len(weight), -1)

    def _scale(
        self, low: NDArray[np.float32], high: NDArray[np.float32], scale: NDArray[np.uint8 | np.float32]
    ) -> NDArray[np.float32]:
        """Writes the scales of groups, given their least and largest values; returns the factors to multiply weights
        by."""
        if self.scale_kind != E8M0:
            check_finite(low, high)
            np.copyto(scale, wanted_scale(self.table, low, high))
            return inverse_of(scale.astype(np.float32, copy=False))
        power = self.powers(np.maximum(-low, high))
        np.copyto(scale, power)
        inverse: NDArray[np.float32] = np.ldexp(np.float32(1), _BIAS - power.astype(np.int32))
        return inverse

    def powers(self, largest: NDArray[np.float32]) -> NDArray[np.uint8]:
        """The bytes of power-of-two scales, for groups with these largest magnitudes."""
        check_finite(largest)
        # The exponent of the largest magnitude, rounded to one fraction bit as compressed-tensors does, so that a
        # group's largest value seldom exceeds the table.
        part, exponent = np.frexp(largest)
        most = int(np.log2(np.abs(self.values).max()))
        power = exponent - 1 + (part >= 0.875) - most + _BIAS
        found: NDArray[np.uint8] = np.clip(power, 0, MOST_POWER).astype(np.uint8)
        return found


def power_of(byte: NDArray[np.uint8]) -> NDArray[np.float32]:
    """The values of power-of-two scale bytes."""
    found: NDArray[np.float32] = np.ldexp(np.float32(1), byte.astype(np.int32) - _BIAS)
    return found


SCHEMES = (
    Scheme("mxfp4", Codes("e2m1", 32, E8M0), 16, head="w8a16"),
    Scheme("nvfp4", Codes("e2m1", 16), 16, head="w8a16"),
    Scheme("nf4", Codes("nf4", 64), 16, head="w8a16"),
    Scheme("fp4", Codes("fp4", 64), 16, head="w8a16"),
    Scheme("iq4_nl", Codes("iq4_nl", 32), 16, head="w8a16"),
)
