"""Codes of 4 bits that stand for the floats of a table: value = table[code] · scale.

Tables: e2m1, the floats of 4 bits of OCP's microscaling formats; nf4 and fp4 of bitsandbytes. A group's scale is a
float32, or, as MXFP4 has it, a power of two in a byte (E8M0): 2^(byte − 127). The two scales of NVFP4 are one float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from llmc.quantize.formats.base import SCALE, Plane, Quantized, WeightFormat, check_finite, in_groups, inverse_of
from llmc.quantize.formats.scheme import Scheme

E8M0 = "e8m0"
_BIAS = 127
_MOST_POWER = 254
"""255 is NaN."""
_HALVES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
TABLES: dict[str, NDArray[np.float32]] = {
    "e2m1": np.concatenate([_HALVES, -_HALVES]),
    # Quantiles of a normal distribution (QLoRA, arXiv 2305.14314), as bitsandbytes writes them.
    "nf4": np.array(
        [-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
         -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
         0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0],
        np.float32,
    ),
    # bitsandbytes' own, without infinities; not e2m1.
    "fp4": np.array(
        [0.0, 0.0052083334885537624, 0.6666666865348816, 1.0, 0.3333333432674408, 0.5, 0.1666666716337204, 0.25,
         -0.0, -0.0052083334885537624, -0.6666666865348816, -1.0, -0.3333333432674408, -0.5, -0.1666666716337204,
         -0.25],
        np.float32,
    ),
}  # fmt: skip
"""What codes stand for, by the table's name."""


@dataclass(frozen=True)
class Codes(WeightFormat):
    """table: of `TABLES`. scale_kind: "f32" or "e8m0"."""

    table: str
    group_size: int
    scale_kind: str = "f32"
    kind: ClassVar[str] = "codes"
    bits: ClassVar[int] = 4  # type: ignore[misc]

    @property
    def values(self) -> NDArray[np.float32]:
        return TABLES[self.table]

    def planes(self, k: int) -> tuple[Plane, ...]:
        return (Plane(SCALE, "u8" if self.scale_kind == E8M0 else "f32", self.groups(k)),)

    def resembles(self, other: WeightFormat) -> bool:
        return isinstance(other, Codes) and (other.table, other.scale_kind) == (self.table, self.scale_kind)

    def describe(self) -> str:
        return f"{super().describe()}{' that share a power of two' if self.scale_kind == E8M0 else ''}"

    def value(self, quantized: Quantized) -> NDArray[np.float64]:
        scale = quantized.planes[SCALE]
        wide = np.ldexp(1.0, scale.astype(np.int32) - _BIAS) if self.scale_kind == E8M0 else scale.astype(np.float64)
        group = self.group_of(quantized.numbers.shape[1])
        found: NDArray[np.float64] = np.take(self.values, quantized.numbers).astype(np.float64) * wide[:, group]
        return found

    def quantize_rows(self, weight: NDArray[np.float32], out: Quantized) -> None:
        thresholds, codes = _thresholds(self.table)
        for elements, groups, width in in_groups(weight.shape[1], self.group_size):
            some = weight[:, elements].reshape(len(weight), -1, width)
            some *= self._scale(np.abs(some).max(-1), out.planes[SCALE][:, groups])[..., None]
            out.numbers[:, elements] = codes[np.searchsorted(thresholds, some)].reshape(len(weight), -1)

    def _scale(self, largest: NDArray[np.float32], scale: NDArray[np.uint8 | np.float32]) -> NDArray[np.float32]:
        """Writes the scales of groups with these largest magnitudes; what their weights are to be multiplied by."""
        check_finite(largest)
        most = np.abs(self.values).max()
        if self.scale_kind != E8M0:
            np.divide(largest, most, out=scale)
            return inverse_of(scale.astype(np.float32, copy=False))
        # The power of the largest magnitude, rounded to one bit behind the point as compressed-tensors does: the
        # largest of a group is seldom beyond the table.
        part, exponent = np.frexp(largest)
        power = np.clip(exponent - 1 + (part >= 0.875) - int(np.log2(most)) + _BIAS, 0, _MOST_POWER)
        np.copyto(scale, power, casting="unsafe")
        inverse: NDArray[np.float32] = np.ldexp(np.float32(1), _BIAS - power)
        return inverse


@cache
def _thresholds(table: str) -> tuple[NDArray[np.float32], NDArray[np.uint8]]:
    """Codes by ascending values, and where the next one begins; a value in the middle goes to the even code."""
    values, codes = np.unique(TABLES[table], return_index=True)
    middle = (values[1:] + values[:-1]) / np.float32(2)
    upwards = np.nextafter(middle, np.float32(-np.inf))
    return np.where(codes[:-1] % 2 == 0, middle, upwards), codes.astype(np.uint8)


SCHEMES = (
    Scheme("mxfp4", Codes("e2m1", 32, E8M0), 16, head="w8a16"),
    Scheme("nvfp4", Codes("e2m1", 16), 16, head="w8a16"),
    Scheme("nf4", Codes("nf4", 64), 16, head="w8a16"),
    Scheme("fp4", Codes("fp4", 64), 16, head="w8a16"),
)
