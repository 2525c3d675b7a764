"""4-bit integers with an integer step per group and one scale per row: value = (number − zero) · step · scale.

A group has a step of 1 … 15 and a zero point of 0 … 15, in one byte. So (number − zero) · step fits int8, and sums over
all of K are exact. This is progressive group quantization (QServe, arXiv 2405.04532).
"""

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
    Sums,
    WeightFormat,
    check_finite,
    in_groups,
    inverse_of,
)
from llmc.quantize.formats.scheme import Scheme

STEP = "step"
_LARGEST = 120
"""(number − zero) · step of a row's largest magnitude: eight times the largest step."""


@dataclass(frozen=True)
class Steps(WeightFormat):
    """asymmetric: zero points fit the group, rather than being 7 or 8. Kernels read both alike."""

    group_size: int = WHOLE_ROW
    asymmetric: bool = False
    kind: ClassVar[str] = "steps"
    bits: ClassVar[int] = 4  # type: ignore[misc]

    def planes(self, k: int) -> tuple[Plane, ...]:
        """One byte per group: step + 16 · zero."""
        return Plane(SCALE, "f32", 1), Plane(STEP, "u8", self.groups(k))

    @property
    def sums(self) -> Sums:
        """The activation sums for kernels that multiply the bytes (number − zero) · step + 128."""
        return Sums(WHOLE_ROW, -128)

    def kernel_params(self) -> dict[str, int | bool | str]:
        return {"format": self.kind, "group_size": self.group_size}

    @property
    def is_regrouped(self) -> bool:
        return True

    def describe(self) -> str:
        return f"{'asymmetric' if self.asymmetric else 'symmetric'} {super().describe()}"

    def value(self, quantized: Quantized) -> NDArray[np.float64]:
        both = quantized.planes[STEP][:, self.group_of(quantized.numbers.shape[1])]
        wide: NDArray[np.float64] = (quantized.numbers - (both >> 4).astype(np.float64)) * (both & 15)
        return wide * quantized.scale.astype(np.float64)

    def quantize_rows(self, weight: NDArray[np.float32], out: Quantized) -> None:
        largest = np.maximum(-weight.min(-1), weight.max(-1))[:, None]
        np.divide(largest, np.float32(_LARGEST), out=out.scale)
        check_finite(out.scale)
        for elements, groups, width in in_groups(weight.shape[1], self.group_size):
            some = weight[:, elements].reshape(len(weight), -1, width)
            self._round(some, out.numbers[:, elements].reshape(some.shape), out.scale, out.planes[STEP][:, groups])

    def _round(
        self,
        weight: NDArray[np.float32],
        numbers: NDArray[np.uint8],
        scale: NDArray[np.float32],
        step_zero: NDArray[np.uint8],
    ) -> None:
        """Rounds views [R, groups, width], given row scales [R, 1]. step_zero: [R, groups]."""
        low, high, inverse = weight.min(-1), weight.max(-1), inverse_of(scale)
        if self.asymmetric:
            low, high = np.minimum(low, 0), np.maximum(high, 0)
            range_ = (high - low) / np.float32(15)
        else:
            range_ = np.maximum(-low, high) / np.float32(8)
        step = np.clip(np.rint(range_ * inverse), 1, 15)
        inverse = inverse / step
        if self.asymmetric:
            # (0 − zero) · step and (15 − zero) · step must fit int8.
            zero = np.clip(np.rint(-low * inverse), np.maximum(15 - 127 // step, 0), np.minimum(128 // step, 15))
        else:
            # The value furthest from 0 goes to the end of the range with one more number.
            zero = np.where(-low >= high, np.float32(8), np.float32(7))
        weight *= inverse[..., None]
        np.rint(weight, out=weight)
        weight += zero[..., None]
        np.clip(weight, 0, 15, out=weight)
        np.copyto(numbers, weight, casting="unsafe")
        np.copyto(step_zero, step + 16 * zero, casting="unsafe")


SCHEMES = (Scheme("w4a8", Steps(64), 8, head="w8a8"),)
