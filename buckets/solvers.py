"""Ladders with a limited number of buckets for a problem: searched, or made by rule."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from .candidates import SEARCH_CELLS, PhaseProblem
from .exact import solve as solve_axis
from .fixed import FAMILIES, grid_ladders
from .grid import search

# Relative cost differences below this do not count.
_ROUNDING = 1e-12

Pairs = list[tuple[int, int]]
Solver = Callable[[int], Pairs]


def solver_of(
    problem: PhaseProblem,
    most: int,
    block_size: int,
    scored: PhaseProblem | None = None,
    cells: int = SEARCH_CELLS,
) -> Solver:
    """A solver for up to `most` buckets: returns the best ladder found or, if better by true lengths, one made by rule.

    scored: the problem that decides which is better, if `problem` has other demand to learn from. cells: grid cells to
    search.
    """
    scored = scored or problem
    one_axis = len(problem.batches) == 1
    searched = _along_axis(problem, most) if one_axis else _in_grid(problem, scored, block_size, cells)
    return lambda count: cheapest(scored, [searched(count), *by_rule(scored, count, block_size)])


def _along_axis(problem: PhaseProblem, most: int) -> Solver:
    solved = solve_axis(problem.cost[0], problem.weight[0], min(most, len(problem.seqs)))
    return lambda count: problem.buckets_of(tuple((0, j) for j in solved.ladder(count)))


def _in_grid(problem: PhaseProblem, scored: PhaseProblem, block_size: int, most_cells: int) -> Solver:
    def solver(count: int) -> Pairs:
        small, rows, columns = problem.for_search(most_cells)
        rules = sorted(by_rule(scored, count, block_size), key=lambda pairs: scored.evaluate(pairs).cost)
        fixed = list(dict.fromkeys(map(problem.cells_of, rules)))[:2]
        starts = [
            tuple((int(np.searchsorted(rows, i)), int(np.searchsorted(columns, j))) for i, j in cells)
            for cells in fixed
        ]
        found = search(small, count - 1, starts)
        cells = tuple((int(rows[i]), int(columns[j])) for i, j in found)
        pool = [problem.shrink(choice) for choice in (cells, *fixed) if len(choice) < count]
        return problem.buckets_of(min(pool, key=problem.full.total))

    return solver


def cheapest(problem: PhaseProblem, ladders: Sequence[Pairs]) -> Pairs:
    """The first of the cheapest ladders, by true lengths."""
    costs = [problem.evaluate(buckets).cost for buckets in ladders]
    least = min(costs)
    return next(buckets for buckets, cost in zip(ladders, costs, strict=True) if cost <= least * (1 + _ROUNDING))


def by_rule(problem: PhaseProblem, count: int, block_size: int, families: Sequence[str] = FAMILIES) -> list[Pairs]:
    """All ladders of the families with at most `count` buckets, the base bucket included and forbidden ones
    excluded."""
    max_batch, top = int(problem.batches[-1]), problem.base_bucket[1]
    ladders = []
    for family in families:
        for ladder in grid_ladders(family, count, max_batch, top, block_size):
            kept = {bucket for bucket in ladder if problem.may_open(*bucket)} | {problem.base_bucket}
            if len(kept) <= count:
                ladders.append(sorted(kept))
    return ladders
