"""Round to nearest: the number closest to each weight, with scales from the range of each group."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmc.quantize.scheme import WHOLE_ROW, QuantizeError, WeightFormat

_LARGEST_STEPPED = 120
"""(number - zero) * step of the value of a row that is furthest from 0: eight times the largest step."""


@dataclass(frozen=True)
class Quantized:
    """numbers: uint8 [N, K]; scale: float32 [N, scales]; of_group: uint8 [N, groups], what the format says, or None."""

    format: WeightFormat
    numbers: NDArray[np.uint8]
    scale: NDArray[np.float32]
    of_group: NDArray[np.uint8] | None

    def value(self) -> NDArray[np.float64]:
        """What the numbers stand for."""
        k = self.numbers.shape[1]
        group = np.arange(k) // (k if self.format.group_size == WHOLE_ROW else self.format.group_size)
        if self.of_group is None:
            zero: Any = np.float64(self.format.middle)
        else:
            zero = (self.of_group >> (4 if self.format.steps else 0))[:, group].astype(np.float64)
        wide: NDArray[np.float64] = self.numbers - zero
        if self.format.steps:
            assert self.of_group is not None
            return wide * (self.of_group & 15)[:, group] * self.scale.astype(np.float64)
        return wide * self.scale[:, group].astype(np.float64)


def quantize(weight: NDArray[Any], format: WeightFormat) -> Quantized:
    """Quantizes [N, K] float32. Raises QuantizeError on a value that is not finite."""
    n, k = weight.shape
    out = Quantized(
        format,
        np.empty((n, k), np.uint8),
        np.empty((n, format.scales(k)), np.float32),
        np.empty((n, format.groups(k)), np.uint8) if format.of_group else None,
    )
    quantize_rows(np.array(weight, np.float32), out.numbers, out.scale, out.of_group, format)
    return out


def quantize_rows(
    weight: NDArray[np.float32],
    numbers: NDArray[np.uint8],
    scale: NDArray[np.float32],
    of_group: NDArray[np.uint8] | None,
    format: WeightFormat,
) -> None:
    """Quantizes rows [R, K] into `numbers` [R, K], `scale` [R, scales], `of_group` [R, groups]. Overwrites `weight`."""
    k = weight.shape[1]
    if format.steps:
        np.divide(np.maximum(-weight.min(-1), weight.max(-1))[:, None], np.float32(_LARGEST_STEPPED), out=scale)
        _check_finite(scale)
    size = k if format.group_size == WHOLE_ROW else min(format.group_size, k)
    whole = k // size * size
    for first, last, width in ((0, whole, size), (whole, k, k - whole)):
        if first == last:
            continue
        groups = slice(first // size, -(-last // size))
        some = weight[:, first:last].reshape(len(weight), -1, width)
        some_numbers = numbers[:, first:last].reshape(len(weight), -1, width)
        of_some = None if of_group is None else of_group[:, groups]
        if format.steps:
            assert of_some is not None
            _stepped_groups(some, some_numbers, scale, of_some, asymmetric=format.asymmetric)
        else:
            _groups(some, some_numbers, scale[:, groups], of_some, format.bits)


def _groups(
    weight: NDArray[np.float32],
    numbers: NDArray[np.uint8],
    scale: NDArray[np.float32],
    zero: NDArray[np.uint8] | None,
    bits: int,
) -> None:
    """Quantizes views [R, groups, width]."""
    low, high = weight.min(-1), weight.max(-1)
    _check_finite(low, high)
    top = (1 << bits) - 1
    if zero is not None:
        low, high = np.minimum(low, 0), np.maximum(high, 0)
        np.divide(high - low, np.float32(top), out=scale)
        inverse = _inverse(scale)
        zero[...] = np.rint(-low * inverse)
        middle: Any = zero.astype(np.float32)[..., None]
    elif bits == 4:
        # The value furthest from 0 becomes the end of the range that has one number more; its scale may be negative.
        np.divide(np.where(-low >= high, low, high), np.float32(-8), out=scale)
        inverse, middle = _inverse(scale), np.float32(8)
    else:
        np.divide(np.maximum(-low, high), np.float32(127), out=scale)
        inverse, middle = _inverse(scale), np.float32(128)
    weight *= inverse[..., None]
    np.rint(weight, out=weight)
    weight += middle
    if bits == 4:
        np.clip(weight, 0, top, out=weight)
    np.copyto(numbers, weight, casting="unsafe")


def _stepped_groups(
    weight: NDArray[np.float32],
    numbers: NDArray[np.uint8],
    scale: NDArray[np.float32],
    step_zero: NDArray[np.uint8],
    *,
    asymmetric: bool,
) -> None:
    """Quantizes views [R, groups, width] by the scales [R, 1] of their rows; step_zero: [R, groups]."""
    low, high, inverse = weight.min(-1), weight.max(-1), _inverse(scale)
    if asymmetric:
        low, high = np.minimum(low, 0), np.maximum(high, 0)
        range_ = (high - low) / np.float32(15)
    else:
        range_ = np.maximum(-low, high) / np.float32(8)
    step = np.clip(np.rint(range_ * inverse), 1, 15)
    inverse = inverse / step
    if asymmetric:
        # (0 - zero) * step and (15 - zero) * step have to be int8.
        zero = np.clip(np.rint(-low * inverse), np.maximum(15 - 127 // step, 0), np.minimum(128 // step, 15))
    else:
        # The value furthest from 0 is at the end that has one number more.
        zero = np.where(-low >= high, np.float32(8), np.float32(7))
    weight *= inverse[..., None]
    np.rint(weight, out=weight)
    weight += zero[..., None]
    np.clip(weight, 0, 15, out=weight)
    np.copyto(numbers, weight, casting="unsafe")
    np.copyto(step_zero, step + 16 * zero, casting="unsafe")


def _check_finite(*arrays: NDArray[np.float32]) -> None:
    if not all(np.isfinite(array).all() for array in arrays):
        raise QuantizeError("a weight is infinite or not a number; quantize a checkpoint whose weights are finite")


def _inverse(scale: NDArray[np.float32]) -> NDArray[np.float32]:
    """1 / scale, and 0 where that would be infinite."""
    inverse = np.zeros_like(scale)
    np.divide(np.float32(1), scale, out=inverse, where=np.abs(scale) > 1e-37)
    return inverse
