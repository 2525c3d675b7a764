"""How much rounding changes a weight."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmc.quantize.formats.base import WeightFormat
from llmc.quantize.rtn import quantize

_PIECE = 1 << 20  # elements processed at a time


@dataclass(frozen=True)
class WeightError:
    """Sums of squares of the weight's elements and of their rounding errors."""

    weight: float
    change: float

    @property
    def relative(self) -> float:
        """RMS of the errors divided by RMS of the weight; 0 for a weight of zeros."""
        return math.sqrt(self.change / self.weight) if self.weight else 0.0

    def __add__(self, other: WeightError) -> WeightError:
        return WeightError(self.weight + other.weight, self.change + other.change)


def weight_error(
    shape: tuple[int, ...], read_rows: Callable[[int, NDArray[Any]], None], format: WeightFormat
) -> WeightError:
    """The rounding error of a weight [N, K], read in runs of rows.

    read_rows: writes rows [first, first + len(out)) to the float32 array `out`.
    """
    n, k = shape
    count = max(1, _PIECE // k)
    total = WeightError(0.0, 0.0)
    for first in range(0, n, count):
        rows = np.empty((min(count, n - first), k), np.float32)
        read_rows(first, rows)
        change = quantize(rows, format).value() - rows
        total += WeightError(float(np.vdot(rows, rows)), float(np.vdot(change, change)))
    return total
