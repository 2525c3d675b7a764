"""Grids of integers: with a zero point, or with an offset that is a number of its own."""

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


@dataclass(frozen=True, eq=False)
class IntegerGrid(Grid):
    """Numbers stand for (number - zero) * scale. zero: float32. top: the largest number."""

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

    def planes(self) -> Mapping[str, NDArray[Any]]:
        return {SCALE: self.scale, **({ZERO: self.zero.astype(np.uint8)} if self.asymmetric else {})}


@dataclass(frozen=True, eq=False)
class OffsetGrid(Grid):
    """Numbers stand for number * scale - offset."""

    offset: Floats
    top: int

    def rounded(self, weight: Floats) -> Floats:
        numbers = (weight + self.offset) * self.inverse
        np.rint(numbers, out=numbers)
        return np.clip(numbers, 0, self.top, out=numbers)

    def values(self, numbers: Floats) -> Floats:
        values: Floats = numbers * self.scale - self.offset
        return values

    def planes(self) -> Mapping[str, NDArray[Any]]:
        return {SCALE: self.scale, OFFSET: self.offset}


def integer_grids(weight: Floats, format: Integers, shrinks: Sequence[float], dtype: str) -> Iterator[Grid]:
    """The grid of the format's own rounding, shrunk; a symmetric one of 4 bits may also reach one number further on
    the other side."""
    low, high = weight.min(-1), weight.max(-1)
    check_finite(low, high)
    top = (1 << format.bits) - 1
    for shrink in shrinks:
        if format.asymmetric:
            least, most = np.minimum(low, 0) * np.float32(shrink), np.maximum(high, 0) * np.float32(shrink)
            scale = rounded_scale((most - least) / np.float32(top), dtype)
            zero = np.clip(np.rint(-least * inverse_of(scale)), 0, top)
            yield IntegerGrid(scale, zero, top, asymmetric=True)
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
    """Of 4-bit numbers with an offset a group; offsets are stored as scales are."""
    low, high = weight.min(-1), weight.max(-1)
    check_finite(low, high)
    top = (1 << format.bits) - 1
    for shrink in shrinks:
        least, most = np.minimum(low, 0) * np.float32(shrink), np.maximum(high, 0) * np.float32(shrink)
        scale = rounded_scale((most - least) / np.float32(top), dtype)
        yield OffsetGrid(scale, rounded_scale(-least, dtype), top)
