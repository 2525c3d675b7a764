"""GPTQ: rounds columns one at a time, and compensates each error in the columns not yet rounded.

Frantar et al., arXiv 2210.17323. For inputs X, H = XᵀX and weight W, tr((W - Q) H (W - Q)ᵀ) is the squared output
error. Groups are contiguous, and their grids are fixed before rounding, so the checkpoint need not store the rounding
order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmc.quantize.formats.base import Quantized, QuantizeError, WeightFormat
from llmc.quantize.methods.grid import Floats
from llmc.quantize.methods.grids import SHRINKS, find_grid, grouped, quantized

DAMPING = 0.01
_COLUMNS = 16  # columns rounded one by one; wider runs are halved
_BASE = 64  # columns of a triangle inverted by LAPACK
_MOST_DAMPING = 1e3


@dataclass(frozen=True)
class Factor:
    """order: column numbers in the order of rounding. upper: float32 [K, K] in that order, with UᵀU = H⁻¹."""

    order: NDArray[np.int64]
    upper: Floats

    @property
    def cost(self) -> Floats:
        """The cost of a squared error in each column that later columns cannot compensate, in the weight's column
        order."""
        cost = np.empty(len(self.order), np.float32)
        cost[self.order] = 1 / np.square(np.diagonal(self.upper))
        return cost


def _invert(upper: NDArray[np.float64]) -> None:
    """Inverts an upper triangular matrix in place, recursively by halves."""
    size = len(upper)
    if size <= _BASE:
        upper[...] = np.triu(np.linalg.inv(upper))
        return
    half = size // 2
    _invert(upper[:half, :half])
    _invert(upper[half:, half:])
    upper[:half, half:] = -(upper[:half, :half] @ upper[:half, half:]) @ upper[half:, half:]


def factor(hessian: NDArray[Any], damping: float = DAMPING, act_order: bool = True) -> Factor:
    """Factorizes the inverse Hessian.

    hessian: [K, K], the sum of x xᵀ over a layer's inputs, or a multiple of it.
    damping: added to the diagonal, as a fraction of its mean; raised if factorization fails.
    act_order: round the columns with the largest diagonal first.
    Raises QuantizeError unless it is finite.
    """
    if not np.isfinite(hessian).all():
        raise QuantizeError("inputs of a layer are infinite or not numbers; calibrate with a model in which they are")
    diagonal = np.diagonal(hessian).astype(np.float64)
    mean = float(diagonal.mean()) or 1.0
    order = np.argsort(-diagonal, kind="stable") if act_order else np.arange(len(diagonal))
    share = damping
    while True:
        # The reversed Cholesky factor of H is upper triangular; its inverse is the factor of H⁻¹.
        wide = hessian[np.ix_(order[::-1], order[::-1])].astype(np.float64)
        wide[np.diag_indices_from(wide)] += share * mean
        try:
            lower: NDArray[Any] = np.linalg.cholesky(wide)
        except np.linalg.LinAlgError:
            share = max(10 * share, 1e-6)
            if share > _MOST_DAMPING:
                raise QuantizeError("inputs of a layer have no sensible second moments; use other text") from None
            continue
        del wide
        upper = lower[::-1, ::-1]
        _invert(upper)
        return Factor(order, upper.astype(np.float32))


def quantize_rows(
    weight: Floats, factor: Factor, format: WeightFormat, *, dtype: str = "f32", shrinks: Sequence[float] = SHRINKS
) -> Quantized:
    """Quantizes rows [R, K] of a weight, each independently of the others. dtype: of stored scales."""
    grid = find_grid(weight, format, dtype=dtype, shrinks=shrinks, importance=factor.cost)
    width = grouped(weight, format).shape[2]
    # Transposed, in rounding order: each column is contiguous in memory.
    columns = np.ascontiguousarray(weight.T[factor.order])
    numbers = np.empty_like(columns)
    errors = np.empty_like(columns)
    grids = grid.of_groups()
    upper, group = factor.upper, factor.order // width

    def solve(first: int, last: int) -> None:
        if last - first > _COLUMNS:
            middle = (first + last) // 2
            solve(first, middle)
            columns[middle:last] -= upper[first:middle, middle:last].T @ errors[first:middle]
            return solve(middle, last)
        for j in range(first, last):
            of = grids[group[j]]
            numbers[j] = of.rounded(columns[j])
            value = of.values(numbers[j])
            np.divide(columns[j] - value, upper[j, j], out=errors[j])
            columns[j + 1 : last] -= upper[j, j + 1 : last, None] * errors[j]

    solve(0, len(columns))
    in_place = np.empty_like(numbers)
    in_place[factor.order] = numbers
    return quantized(np.ascontiguousarray(in_place.T), grid, format)
