"""Grids of integers with a zero point, or with a real-valued offset."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmc.quantize.formats.affine import OFFSET, Affine
from llmc.quantize.formats.base import SCALE, check_finite, inverse_of
from llmc.quantize.formats.integers import ZERO, Integers
from llmc.quantize.methods.grid import Floats, Grid, rounded_scale

_MOVES = (-0.08, -0.05, -0.02, 0.02, 0.04, 0.06, 0.08, 0.1, 0.13, 0.16, 0.2, 0.25)
"""How far an end of a range is moved inwards, as a fraction of the range's width."""


@dataclass(frozen=True, eq=False)
class IntegerGrid(Grid):
    """value = (number − zero) · scale. zero: float32. top: the largest number."""

    zero: Floats
    top: int
    asymmetric: bool

    def rounded(self, weight: Floats) -> Floats:
        numbers = weight * self.inverse
        np.rint(numbers, out=numbers)
        numbers += self.zero
        return np.clip(numbers, 0, self.top, out=numbers)

    def values(self, numbers: Floats) -> Floats:
        values: Floats = (numbers - self.zero) * self.scale
        return values

    def with_end_moved(self, end: int, dtype: str) -> Iterator[IntegerGrid]:
        if not self.asymmetric:
            return
        for low, high in _moved(-self.zero * self.scale, (self.top - self.zero) * self.scale, end):
            yield _between(low, high, self.top, dtype)

    def planes(self) -> Mapping[str, NDArray[Any]]:
        return {SCALE: self.scale, **({ZERO: self.zero.astype(np.uint8)} if self.asymmetric else {})}


@dataclass(frozen=True, eq=False)
class OffsetGrid(Grid):
    """value = number · scale − offset."""

    offset: Floats
    top: int

    def rounded(self, weight: Floats) -> Floats:
        numbers = (weight + self.offset) * self.inverse
        np.rint(numbers, out=numbers)
        return np.clip(numbers, 0, self.top, out=numbers)

    def values(self, numbers: Floats) -> Floats:
        values: Floats = numbers * self.scale - self.offset
        return values

    def with_end_moved(self, end: int, dtype: str) -> Iterator[OffsetGrid]:
        for low, high in _moved(-self.offset, self.top * self.scale - self.offset, end):
            yield OffsetGrid(
                rounded_scale((high - low) / np.float32(self.top), dtype), rounded_scale(-low, dtype), self.top
            )

    def planes(self) -> Mapping[str, NDArray[Any]]:
        return {SCALE: self.scale, OFFSET: self.offset}


def _moved(low: Floats, high: Floats, end: int) -> Iterator[tuple[Floats, Floats]]:
    width = high - low
    for move in _MOVES:
        by = width * np.float32(move)
        yield (np.minimum(low + by, 0), high) if end == 0 else (low, np.maximum(high - by, 0))


def _between(low: Floats, high: Floats, top: int, dtype: str) -> IntegerGrid:
    """The asymmetric grid for ranges that include 0."""
    scale = rounded_scale((high - low) / np.float32(top), dtype)
    return IntegerGrid(scale, np.clip(np.rint(-low * inverse_of(scale)), 0, top), top, asymmetric=True)


def integer_grids(weight: Floats, format: Integers, shrinks: Sequence[float], dtype: str) -> Iterator[Grid]:
    """The grid of the format's own rounding, with shrunk ranges. A symmetric 4-bit grid may also extend by one number
    on its other side."""
    low, high = weight.min(-1), weight.max(-1)
    check_finite(low, high)
    top = (1 << format.bits) - 1
    for shrink in shrinks:
        if format.asymmetric:
            by = np.float32(shrink)
            yield _between(np.minimum(low, 0) * by, np.maximum(high, 0) * by, top, dtype)
            continue
        middle = np.full(low.shape, format.middle, np.float32)
        if format.bits == 4:
            scale = rounded_scale(np.where(-low >= high, low, high) / np.float32(-8) * np.float32(shrink), dtype)
            yield IntegerGrid(scale, middle, top, asymmetric=False)
            if len(shrinks) > 1:
                yield IntegerGrid(-scale, middle, top, asymmetric=False)
        else:
            scale = np.maximum(-low, high) / np.float32(format.middle - 1) * np.float32(shrink)
            yield IntegerGrid(rounded_scale(scale, dtype), middle, top, asymmetric=False)


def offset_grids(weight: Floats, format: Affine, shrinks: Sequence[float], dtype: str) -> Iterator[Grid]:
    """Grids of 4-bit numbers with an offset per group; offsets are stored in the dtype of scales."""
    low, high = weight.min(-1), weight.max(-1)
    check_finite(low, high)
    top = (1 << format.bits) - 1
    for shrink in shrinks:
        least, most = np.minimum(low, 0) * np.float32(shrink), np.maximum(high, 0) * np.float32(shrink)
        scale = rounded_scale((most - least) / np.float32(top), dtype)
        yield OffsetGrid(scale, rounded_scale(-least, dtype), top)
