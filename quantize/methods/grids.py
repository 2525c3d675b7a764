"""Grids of groups: scales and zero points that weigh what rounding costs, and rounding to a grid that is given."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from llmc.quantize.formats.base import SCALE, Quantized, QuantizeError, check_finite, inverse_of
from llmc.quantize.formats.integers import ZERO, Integers

Floats = NDArray[np.float32]

SHRINKS = tuple((54 - step) / 50 for step in range(26))
"""What ranges are multiplied by when the best one is looked for."""
ONE = (1.0,)
SCALE_DTYPES = ("f32", "f16", "bf16")


@dataclass(frozen=True)
class Grid:
    """What numbers of rows [R, K] stand for: (number - zero) * scale, both float32 [R, G]. top: the largest number."""

    scale: Floats
    zero: Floats
    top: int

    def rounded(self, weight: Floats) -> Floats:
        """The nearest numbers of [R, G, width], as float32."""
        numbers = weight * inverse_of(self.scale)[..., None]
        np.rint(numbers, out=numbers)
        numbers += self.zero[..., None]
        return np.clip(numbers, 0, self.top, out=numbers)

    def values(self, numbers: Floats) -> Floats:
        """What numbers [R, G, width] stand for."""
        values: Floats = (numbers - self.zero[..., None]) * self.scale[..., None]
        return values

    def quantized(self, numbers: Floats, format: Integers) -> Quantized:
        """numbers: [R, G, width]."""
        planes = {SCALE: self.scale}
        if format.asymmetric:
            planes[ZERO] = self.zero.astype(np.uint8)
        return Quantized(format, numbers.astype(np.uint8).reshape(len(numbers), -1), planes)


def rounded_scale(scale: Floats, dtype: str) -> Floats:
    """The float32 values of scales that are stored in `dtype`, one of SCALE_DTYPES."""
    if dtype == "f16":
        return np.clip(scale, -65504, 65504).astype(np.float16).astype(np.float32)
    if dtype == "bf16":
        bits = np.ascontiguousarray(scale).view(np.uint32)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)).view(np.float32)
    return scale


def grouped(weight: Floats, format: Integers) -> Floats:
    """[R, G, width] of [R, K]. Raises QuantizeError unless rows are whole groups."""
    k = weight.shape[1]
    groups = format.groups(k)
    if k % groups or (groups > 1 and k != groups * format.group_size):
        raise QuantizeError(f"rows of {k} numbers are no whole groups of {format.group_size}; use another group size")
    return weight.reshape(len(weight), groups, -1)


def _candidates(weight: Floats, format: Integers, shrinks: Sequence[float], dtype: str) -> Iterator[Grid]:
    """The grid of the format's own rounding, shrunk; a symmetric one of 4 bits may also reach one number further on
    the other side."""
    low, high = weight.min(-1), weight.max(-1)
    check_finite(low, high)
    top = (1 << format.bits) - 1
    for shrink in shrinks:
        if format.asymmetric:
            least, most = np.minimum(low, 0) * np.float32(shrink), np.maximum(high, 0) * np.float32(shrink)
            scale = rounded_scale((most - least) / np.float32(top), dtype)
            yield Grid(scale, np.clip(np.rint(-least * inverse_of(scale)), 0, top), top)
            continue
        middle = np.full(low.shape, format.middle, np.float32)
        if format.bits == 4:
            scale = rounded_scale(np.where(-low >= high, low, high) / np.float32(-8) * np.float32(shrink), dtype)
            yield Grid(scale, middle, top)
            if len(shrinks) > 1:
                yield Grid(-scale, middle, top)
        else:
            scale = np.maximum(-low, high) / np.float32(format.middle - 1) * np.float32(shrink)
            yield Grid(rounded_scale(scale, dtype), middle, top)


def find_grid(
    weight: Floats,
    format: Integers,
    *,
    dtype: str = "f32",
    shrinks: Sequence[float] = SHRINKS,
    importance: Floats | None = None,
    gram: Floats | None = None,
) -> Grid:
    """The grid of rows [R, K] with the least cost of rounding to nearest, of each group apart.

    importance: [K], what a squared error of a column costs. gram: [G, width, width], that of each group's columns
    together. Neither: all columns are alike. dtype: what scales are stored in.
    """
    groups = grouped(weight, format)
    best: Grid | None = None
    least = np.empty(0, np.float32)
    weights = None if importance is None else importance.reshape(groups.shape[1:])
    for grid in _candidates(groups, format, shrinks, dtype):
        if len(shrinks) == 1:
            return grid
        error = grid.values(grid.rounded(groups)) - groups
        if gram is not None:
            across = np.matmul(error.transpose(1, 0, 2), gram).transpose(1, 0, 2)
            cost = np.einsum("rgw,rgw->rg", across, error)
        else:
            np.square(error, out=error)
            cost = error.sum(-1) if weights is None else np.einsum("rgw,gw->rg", error, weights)
        if best is None:
            best, least = grid, cost
            continue
        better = cost < least
        best = Grid(np.where(better, grid.scale, best.scale), np.where(better, grid.zero, best.zero), grid.top)
        least = np.where(better, cost, least)
    assert best is not None
    return best


def round_to_nearest(weight: Floats, format: Integers, grid: Grid) -> Quantized:
    """Rows [R, K] on a grid that was found for them."""
    return grid.quantized(grid.rounded(grouped(weight, format)), format)


def group_grams(gram: Floats, format: Integers) -> Floats:
    """[G, width, width]: of a matrix [K, K] what each group has with itself."""
    k = len(gram)
    groups = format.groups(k)
    width = k // groups
    return np.stack([gram[g * width : (g + 1) * width, g * width : (g + 1) * width] for g in range(groups)])
