"""Grids of small floats: FP8 and 4-bit codes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmc.quantize.formats import fp8
from llmc.quantize.formats.base import SCALE, check_finite
from llmc.quantize.formats.codes import E8M0, MOST_POWER, Codes, power_of
from llmc.quantize.formats.fp8 import Fp8
from llmc.quantize.formats.tables import nearest
from llmc.quantize.methods.grid import Floats, Grid, rounded_scale


@dataclass(frozen=True, eq=False)
class Fp8Grid(Grid):
    def rounded(self, weight: Floats) -> Floats:
        return fp8.nearest(np.ascontiguousarray(weight * self.inverse)).astype(np.float32)

    def values(self, numbers: Floats) -> Floats:
        return np.take(fp8.VALUES, numbers.astype(np.uint8)) * self.scale

    def planes(self) -> Mapping[str, NDArray[Any]]:
        return {SCALE: self.scale}


@dataclass(frozen=True, eq=False)
class CodeGrid(Grid):
    """exponents: bytes of power-of-two scales; `scale` holds them as float32."""

    exponents: NDArray[np.uint8]
    format: Codes

    def rounded(self, weight: Floats) -> Floats:
        return nearest(self.format.table, weight * self.inverse).astype(np.float32)

    def values(self, numbers: Floats) -> Floats:
        return np.take(self.format.values, numbers.astype(np.uint8)) * self.scale

    def planes(self) -> Mapping[str, NDArray[Any]]:
        return {SCALE: self.exponents if self.format.scale_kind == E8M0 else self.scale}


def fp8_grids(weight: Floats, format: Fp8, shrinks: Sequence[float], dtype: str) -> Iterator[Grid]:
    largest = np.abs(weight).max(-1)
    check_finite(largest)
    for shrink in shrinks:
        yield Fp8Grid(rounded_scale(largest / np.float32(fp8.LARGEST) * np.float32(shrink), dtype))


def code_grids(weight: Floats, format: Codes, shrinks: Sequence[float], dtype: str) -> Iterator[Grid]:
    """The grids of shrunk ranges. Power-of-two scales only offer a neighbour on either side."""
    largest = np.abs(weight).max(-1)
    if format.scale_kind == E8M0:
        powers = format.powers(largest).astype(np.int16)
        for move in (0, -1, 1) if len(shrinks) > 1 else (0,):
            moved = np.clip(powers + move, 0, MOST_POWER).astype(np.uint8)
            yield CodeGrid(power_of(moved), moved, format)
        return
    check_finite(largest)
    for shrink in shrinks:
        scale = rounded_scale(largest / np.abs(format.values).max() * np.float32(shrink), dtype)
        yield CodeGrid(scale, np.zeros(scale.shape, np.uint8), format)
