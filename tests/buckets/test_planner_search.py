"""The searches of the planner, over one axis and over a grid: optima and bounds against brute force."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmc.buckets import exact as exact_module
from llmc.buckets.exact import solve as solve_axis
from llmc.buckets.grid import GridProblem, lower_bound, search

# ---- one axis ------------------------------------------------------------------------------------------------------

axis = st.lists(st.tuples(st.integers(1, 40), st.integers(0, 6)), min_size=1, max_size=8)


@pytest.mark.parametrize("dense", [0, 384])
@given(axis, st.integers(1, 9), st.booleans())
def test_axis_is_optimal(dense: int, candidates: list[tuple[int, int]], count: int, ascending: bool) -> None:
    costs = [float(cost) for cost, _ in candidates]
    cost = np.array(sorted(costs) if ascending else costs)
    weight = np.array([float(w) for _, w in candidates])
    last = len(cost) - 1

    def price(ladder: tuple[int, ...]) -> float:
        return float(sum(weight[p] * min(cost[j] for j in ladder if j >= p) for p in range(last + 1)))

    before = exact_module._DENSE
    exact_module._DENSE = dense
    try:
        solved = solve_axis(cost, weight, count)
    finally:
        exact_module._DENSE = before
    for k in range(1, count + 1):
        best = min(price((*rest, last)) for r in range(min(k, last + 1)) for rest in combinations(range(last), r))
        assert solved.cost[k - 1] == pytest.approx(best)
        ladder = solved.ladder(k)
        assert len(ladder) <= k
        assert ladder[-1] == last
        assert list(ladder) == sorted(set(ladder))
        assert price(ladder) == pytest.approx(best)


@given(st.integers(0, 1 << 20), st.integers(200, 900))
@settings(max_examples=15)
def test_divide_and_conquer_equals_all_pairs(seed: int, size: int) -> None:
    rng = np.random.default_rng(seed)
    c = np.cumsum(rng.integers(1, 9, size)).astype(float)
    total = np.concatenate(([0.0], np.cumsum(rng.integers(0, 4, size)))).astype(float)
    best = np.concatenate(([0.0], c * total[1:]))
    for _ in range(4):
        dense, divided = exact_module._dense_layer(best, c, total), exact_module._divided_layer(best, c, total)
        assert np.array_equal(dense[0], divided[0])
        assert np.array_equal(dense[1], divided[1])
        best = dense[0]


# ---- the grid ------------------------------------------------------------------------------------------------------


@st.composite
def grids(draw: Callable[..., Any]) -> GridProblem:
    batches = sorted(draw(st.sets(st.integers(1, 9), min_size=1, max_size=3)))
    seqs = sorted(draw(st.sets(st.integers(1, 30), min_size=1, max_size=4)))
    area = np.outer(batches, seqs).astype(float)
    weight = np.array(draw(st.lists(st.integers(0, 5), min_size=area.size, max_size=area.size)), float)
    cells = np.arange(area.size).reshape(area.shape)
    # Rows of a step in a graph of more sequences, rounded up to its row tile, or nothing.
    load = np.array([[-(-step // min(bucket, 4)) * min(bucket, 4) for step in batches] for bucket in batches], float)
    load *= draw(st.sampled_from([0.0, 1.0, 10.0]))
    if draw(st.booleans()):
        rank, base_rank = cells, np.full(area.shape, area.size - 1)
        base, cost = area[-1, -1] + np.repeat(load[-1][:, None], len(seqs), axis=1), area
    else:
        load *= 0
        base = np.outer(batches, np.full(len(seqs), seqs[-1])).astype(float)
        cost = np.where(area > draw(st.integers(1, 60)), np.inf, area)
        rank = np.argsort(np.argsort(area, axis=None, kind="stable")).reshape(area.shape)
        base_rank = np.full(area.shape, area.size)
    return GridProblem(weight.reshape(area.shape), cost, load, rank, cost, load, base, base_rank)


def served_by_hand(problem: GridProblem, chosen: tuple[tuple[int, int], ...]) -> float:
    """Every step in the first open bucket that holds it, else at its base cost."""
    cost = 0.0
    for (b, s), steps in np.ndenumerate(problem.weight):
        holding = [(problem.rank[cell], cell) for cell in chosen if cell[0] >= b and cell[1] >= s]
        first, (i, j) = min(holding, default=(problem.base_rank[b, s], (0, 0)))
        each = problem.cost[i, j] + problem.load[i, b] if first < problem.base_rank[b, s] else problem.base[b, s]
        cost += float(steps * each)
    return cost


@given(grids(), st.integers(0, 4), st.data())
@settings(deadline=None)
def test_gains_are_what_opening_a_bucket_saves(problem: GridProblem, count: int, data: st.DataObject) -> None:
    open_cells = [(int(i), int(j)) for i, j in np.argwhere(np.isfinite(problem.cost))]
    chosen = tuple(data.draw(st.permutations(open_cells)))[:count]
    total = problem.total(chosen)
    assert total == pytest.approx(served_by_hand(problem, chosen))
    gains = problem.gains(*problem.served(chosen))
    for cell in open_cells:
        assert gains[cell] == pytest.approx(total - problem.total((*chosen, cell)))


@given(grids(), st.integers(0, 3))
@settings(deadline=None)
def test_grid_against_brute_force(problem: GridProblem, count: int) -> None:
    open_cells = [(int(i), int(j)) for i, j in np.argwhere(np.isfinite(problem.cost))]
    best = min(problem.total(chosen) for r in range(count + 1) for chosen in combinations(open_cells, r))
    found = search(problem, count)
    assert len(found) <= count
    cost = problem.total(found)
    # The bound never passes the optimum.
    assert best <= cost + 1e-9
    assert cost <= problem.total(()) + 1e-9
    assert lower_bound(problem, count, cost) <= best * (1 + 1e-9) + 1e-9


@given(grids(), st.integers(1, 3), st.data())
@settings(deadline=None)
def test_search_is_no_worse_than_its_starts(problem: GridProblem, count: int, data: st.DataObject) -> None:
    open_cells = [(int(i), int(j)) for i, j in np.argwhere(np.isfinite(problem.cost))]
    start = tuple(data.draw(st.permutations(open_cells)))[:count]
    assert problem.total(search(problem, count, [start])) <= problem.total(start) * (1 + 1e-12)
