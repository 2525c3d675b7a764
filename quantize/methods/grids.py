"""Finds the least-cost grid of each group, and rounds to a given grid."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmc.quantize.formats.base import Quantized, QuantizeError, WeightFormat
from llmc.quantize.methods.float_grids import code_grids, fp8_grids
from llmc.quantize.methods.grid import Floats, Grid
from llmc.quantize.methods.integer_grids import integer_grids, offset_grids

SHRINKS = tuple((54 - step) / 50 for step in range(26))
"""Range factors tried in the search for the best range."""
ONE = (1.0,)

_CANDIDATES: dict[str, Callable[[Floats, Any, Sequence[float], str], Iterator[Grid]]] = {
    "integers": integer_grids,
    "affine": offset_grids,
    "fp8": fp8_grids,
    "codes": code_grids,
}
"""By kind of format: the candidate grids for groups [R, G, width], one per range factor. The first is the format's own
rounding."""


def grouped(weight: Floats, format: WeightFormat) -> Floats:
    """Reshapes [R, K] to [R, G, width]. Raises QuantizeError unless rows are whole groups."""
    k = weight.shape[1]
    groups = format.groups(k)
    if k % groups or (groups > 1 and k != groups * format.group_size):
        raise QuantizeError(f"rows of {k} numbers are not whole groups of {format.group_size}; use another group size")
    return weight.reshape(len(weight), groups, -1)


def find_grid(
    weight: Floats,
    format: WeightFormat,
    *,
    dtype: str = "f32",
    shrinks: Sequence[float] = SHRINKS,
    importance: Floats | None = None,
    gram: Floats | None = None,
    ends: bool = False,
) -> Grid:
    """The grid of rows [R, K] with the least cost of rounding to nearest, chosen for each group alone.

    importance: [K], the cost of a squared error in each column. gram: [G, width, width], the cost of errors in a
    group's columns jointly. Neither: all columns cost alike. dtype: of stored scales. ends: also move either end of the
    best range alone, in grids with two ends.
    """
    groups = grouped(weight, format)
    weights = None if importance is None else importance.reshape(groups.shape[1:])
    if len(shrinks) == 1:
        return next(_CANDIDATES[format.kind](groups, format, shrinks, dtype))

    def cost(error: Floats) -> Floats:
        if gram is not None:
            across = np.matmul(error.transpose(1, 0, 2), gram).transpose(1, 0, 2)
            return np.asarray(np.einsum("rgw,rgw->rg", across, error))
        np.square(error, out=error)
        return np.asarray(error.sum(-1) if weights is None else np.einsum("rgw,gw->rg", error, weights))

    return _cheapest(groups, format, dtype, shrinks, cost, ends=ends)


def settle(weight: Floats, format: WeightFormat, grid: Grid, gram: Floats, *, dtype: str = "f32",
           shrinks: Sequence[float] = SHRINKS) -> Grid:  # fmt: skip
    """Improves the grid of rows [R, K]: reselects each group's grid for the least joint cost of rounding to nearest.

    Groups are visited in turn, given the others' output errors, because errors of two groups may cancel. gram: [K, K].
    """
    groups = grouped(weight, format)
    count, width = groups.shape[1:]
    wide = grid.wide()
    change = (wide.values(wide.rounded(groups)) - groups).reshape(weight.shape)
    found = grid.of_groups()
    for g in range(count):
        here = slice(g * width, (g + 1) * width)
        own, some = gram[here, here], groups[:, g : g + 1]
        others = np.float32(2) * (change @ gram[:, here] - change[:, here] @ own)

        def cost(error: Floats, own: Floats = own, others: NDArray[Any] = others) -> Floats:
            return np.asarray(((error[:, 0] @ own + others) * error[:, 0]).sum(-1)[:, None])

        start = found[g].mapped(lambda array: array[:, None])
        best = _cheapest(some, format, dtype, shrinks, cost, ends=True, start=start)
        wide = best.wide()
        change[:, here] = (wide.values(wide.rounded(some)) - some)[:, 0]
        found[g] = best.mapped(lambda array: np.ascontiguousarray(array[:, 0]))
    return grid.joined(found)


def _cheapest(
    groups: Floats,
    format: WeightFormat,
    dtype: str,
    shrinks: Sequence[float],
    cost: Callable[[Floats], Floats],
    *,
    ends: bool,
    start: Grid | None = None,
) -> Grid:
    """The least-cost grid of each group [R, G, width]. cost: maps errors [R, G, width] to [R, G]; may overwrite
    them."""

    def cost_of(grid: Grid) -> Floats:
        wide = grid.wide()
        return cost(wide.values(wide.rounded(groups)) - groups)

    candidates = _CANDIDATES[format.kind](groups, format, shrinks, dtype)
    best = next(candidates) if start is None else start
    least = cost_of(best)
    moved = (grid for end in (0, 1) for grid in best.with_end_moved(end, dtype)) if ends else iter(())
    for grids in (candidates, moved):
        for grid in grids:
            found = cost_of(grid)
            better = found < least
            best = grid.where(better, best)
            least = np.where(better, found, least)
    return best


def quantized(numbers: Floats, grid: Grid, format: WeightFormat) -> Quantized:
    """numbers: [R, K], or [R, G, width] as a grid rounds them."""
    return Quantized(format, numbers.astype(np.uint8).reshape(len(numbers), -1), grid.planes())


def round_to_nearest(weight: Floats, format: WeightFormat, grid: Grid) -> Quantized:
    """Rounds rows [R, K] to nearest on a given grid."""
    return quantized(grid.wide().rounded(grouped(weight, format)), grid, format)


def group_grams(gram: Floats, format: WeightFormat) -> Floats:
    """The diagonal blocks [G, width, width] of a Gram matrix [K, K]."""
    k = len(gram)
    groups = format.groups(k)
    width = k // groups
    return np.stack([gram[g * width : (g + 1) * width, g * width : (g + 1) * width] for g in range(groups)])
