"""Round to nearest: the number closest to each weight, with scales from the range of each group."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmc.quantize.scheme import WHOLE_ROW, QuantizeError, WeightFormat


@dataclass(frozen=True)
class Quantized:
    """numbers: uint8 [N, K]; scale: float32 [N, groups]; zero: uint8 [N, groups], or None for the middle."""

    format: WeightFormat
    numbers: NDArray[np.uint8]
    scale: NDArray[np.float32]
    zero: NDArray[np.uint8] | None

    def value(self) -> NDArray[np.float64]:
        """What the numbers stand for."""
        k = self.numbers.shape[1]
        group = np.arange(k) // (k if self.format.group_size == WHOLE_ROW else self.format.group_size)
        zero = np.float64(self.format.middle) if self.zero is None else self.zero[:, group].astype(np.float64)
        wide: NDArray[np.float64] = (self.numbers - zero) * self.scale[:, group].astype(np.float64)
        return wide


def quantize(weight: NDArray[Any], format: WeightFormat) -> Quantized:
    """Quantizes [N, K] float32. Raises QuantizeError on a value that is not finite."""
    n, k = weight.shape
    groups = format.groups(k)
    out = Quantized(
        format,
        np.empty((n, k), np.uint8),
        np.empty((n, groups), np.float32),
        np.empty((n, groups), np.uint8) if format.asymmetric else None,
    )
    quantize_rows(np.array(weight, np.float32), out.numbers, out.scale, out.zero, format)
    return out


def quantize_rows(
    weight: NDArray[np.float32],
    numbers: NDArray[np.uint8],
    scale: NDArray[np.float32],
    zero: NDArray[np.uint8] | None,
    format: WeightFormat,
) -> None:
    """Quantizes rows [R, K] into `numbers` [R, K], `scale` and `zero` [R, groups]. Overwrites `weight`."""
    k = weight.shape[1]
    size = k if format.group_size == WHOLE_ROW else min(format.group_size, k)
    whole = k // size * size
    for first, last, width in ((0, whole, size), (whole, k, k - whole)):
        if first == last:
            continue
        groups = slice(first // size, -(-last // size))
        _groups(
            weight[:, first:last].reshape(len(weight), -1, width),
            numbers[:, first:last].reshape(len(weight), -1, width),
            scale[:, groups],
            None if zero is None else zero[:, groups],
            format.bits,
        )


def _groups(
    weight: NDArray[np.float32],
    numbers: NDArray[np.uint8],
    scale: NDArray[np.float32],
    zero: NDArray[np.uint8] | None,
    bits: int,
) -> None:
    """Quantizes views [R, groups, width]."""
    low, high = weight.min(-1), weight.max(-1)
    if not (np.isfinite(low).all() and np.isfinite(high).all()):
        raise QuantizeError("a weight is infinite or not a number; quantize a checkpoint whose weights are finite")
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


def _inverse(scale: NDArray[np.float32]) -> NDArray[np.float32]:
    """1 / scale, and 0 where that would be infinite."""
    inverse = np.zeros_like(scale)
    np.divide(np.float32(1), scale, out=inverse, where=np.abs(scale) > 1e-37)
    return inverse
