"""Integers with a scale and optionally a zero point per group: value = (number − zero) · scale."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from llmc.quantize.formats.base import (
    FLOAT,
    SCALE,
    WHOLE_ROW,
    Plane,
    Quantized,
    Sums,
    WeightFormat,
    check_finite,
    in_groups,
    inverse_of,
)
from llmc.quantize.formats.scheme import Scheme

ZERO = "zero"


@dataclass(frozen=True)
class Integers(WeightFormat):
    """asymmetric: a zero point is stored beside each scale; otherwise it is mid-range. scale_kind: "f32" or "f16"."""

    bits: int
    group_size: int = WHOLE_ROW
    asymmetric: bool = False
    scale_kind: str = FLOAT
    kind: ClassVar[str] = "integers"

    @property
    def middle(self) -> int:
        return 1 << (self.bits - 1)

    def planes(self, k: int) -> tuple[Plane, ...]:
        scale = Plane(SCALE, self.scale_kind, self.groups(k))
        return (scale, Plane(ZERO, "u8", self.groups(k))) if self.asymmetric else (scale,)

    @property
    def sums(self) -> Sums | None:
        """The activation sums that correct for zero points.

        Kernels multiply unsigned numbers, then add each group's activation sum times −zero, or times −1 if the zero
        point is stored per group. None for 5- and 6-bit numbers, which no kernel multiplies as integers.
        """
        if self.bits in (5, 6):
            return None
        return Sums(self.group_size, -1 if self.asymmetric else -self.middle)

    @property
    def is_regrouped(self) -> bool:
        return self.bits == 4

    def describe(self) -> str:
        return f"{'asymmetric' if self.asymmetric else 'symmetric'} {super().describe()}"

    def value(self, quantized: Quantized) -> NDArray[np.float64]:
        group = self.group_of(quantized.numbers.shape[1])
        zero: Any = quantized.planes[ZERO][:, group].astype(np.float64) if self.asymmetric else np.float64(self.middle)
        wide: NDArray[np.float64] = (quantized.numbers - zero) * quantized.scale[:, group].astype(np.float64)
        return wide

    def quantize_rows(self, weight: NDArray[np.float32], out: Quantized) -> None:
        for elements, groups, width in in_groups(weight.shape[1], self.group_size):
            some = weight[:, elements].reshape(len(weight), -1, width)
            numbers = out.numbers[:, elements].reshape(some.shape)
            zero = out.planes[ZERO][:, groups] if self.asymmetric else None
            self._round(some, numbers, out.scale[:, groups], zero)

    def _round(
        self,
        weight: NDArray[np.float32],
        numbers: NDArray[np.uint8],
        scale: NDArray[np.float32 | np.float16],
        zero: NDArray[np.uint8] | None,
    ) -> None:
        """Rounds groups into their arrays, which are views [R, groups, width]."""
        low, high = weight.min(-1), weight.max(-1)
        check_finite(low, high)
        top = (1 << self.bits) - 1
        if zero is not None:
            low, high = np.minimum(low, 0), np.maximum(high, 0)
            np.divide(high - low, np.float32(top), out=scale)
            inverse = inverse_of(scale)
            zero[...] = np.rint(-low * inverse)
            middle: Any = zero.astype(np.float32)[..., None]
        elif self.bits < 8:
            # Map the value furthest from 0 to the end of the range with one more number; scales may therefore be
            # negative.
            np.divide(np.where(-low >= high, low, high), np.float32(-self.middle), out=scale)
            inverse, middle = inverse_of(scale), np.float32(self.middle)
        else:
            np.divide(np.maximum(-low, high), np.float32(127), out=scale)
            inverse, middle = inverse_of(scale), np.float32(128)
        weight *= inverse[..., None]
        np.rint(weight, out=weight)
        weight += middle
        if self.bits < 8:
            np.clip(weight, 0, top, out=weight)
        np.copyto(numbers, weight, casting="unsafe")


SCHEMES = (
    Scheme("w8a16", Integers(8), 16, head="w8a16"),
    Scheme("w8a8", Integers(8), 8, head="w8a8"),
    Scheme("w4a16", Integers(4, 64), 16, head="w8a16"),
)
