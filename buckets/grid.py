"""The two-dimensional problem: which (batch, seq) buckets to open so that all steps cost the least.

It is a facility-location problem: a step (b, s) is served by the cheapest open bucket with batch ≥ b and seq ≥ s or,
when none is open, at a base cost (decode: the largest bucket, which is always open; prefill: one sequence at a time in
the longest bucket, always open too). At most K more buckets may be opened. The savings are a monotone submodular
function of the set of open buckets, so greedy opening alone reaches 1 - 1/e of the greatest savings (Nemhauser,
Wolsey, Fisher 1978). `search` starts from greedy, from the best shelf ladder and from given ladders, and improves the
best two by local search; `lower_bound` comes from the Lagrangian relaxation (Cornuéjols, Fisher, Nemhauser 1977), so
that the gap is known for every instance.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .exact import solve as solve_axis

Floats = npt.NDArray[np.float64]
Cell = tuple[int, int]

_BOUND_STEPS = 300
_PATIENCE = 8
_SWEEPS = 8
_CLOSE = 2e-4


@dataclass(frozen=True, slots=True)
class GridProblem:
    """Cells are (batch index, seq index), both ascending sizes; all arrays are [batches, seqs].

    weight: steps that round up to the cell. cost: of a step in the bucket of the cell, infinite where no bucket may be.
    floor: no more than the cost of any bucket that rounds up to the cell (equal to cost when nothing was rounded).
    base: cost of a step of the cell when no open bucket holds it.
    """

    weight: Floats
    cost: Floats
    floor: Floats
    base: Floats

    @property
    def is_open(self) -> bool:
        """Whether there is demand, and a bucket that could be opened for it."""
        return bool(np.any(self.weight > 0) and np.isfinite(self.cost).any())

    def served(self, cells: Iterable[Cell]) -> Floats:
        """Cost of a step of each cell with the buckets `cells` open: painted from dear to cheap."""
        price = self.base.copy()
        for i, j in sorted(cells, key=lambda cell: -self.cost[cell]):
            region = price[: i + 1, : j + 1]
            np.minimum(region, self.cost[i, j], out=region)
        return price

    def total(self, cells: Iterable[Cell]) -> float:
        """Cost of all demand with the buckets `cells` open."""
        return float(np.sum(self.weight * self.served(cells)))

    def gains(self, price: Floats) -> Floats:
        """What opening each bucket saves when a step of each cell costs `price` now: [batches, seqs].

        `price` has few distinct values, one a bucket and one a base, so the demand that a bucket would take from each
        is a running sum of that value's cells.
        """
        saved = np.zeros_like(price)
        for value in np.unique(price[self.weight > 0]):
            taken = np.where(price == value, self.weight, 0.0).cumsum(axis=0).cumsum(axis=1)
            saved += taken * np.maximum(value - self.cost, 0.0)
        return saved


def search(problem: GridProblem, count: int, starts: Iterable[tuple[Cell, ...]] = ()) -> tuple[Cell, ...]:
    """The best cells found, at most `count`; never dearer than one of `starts` that is as small."""
    if count == 0 or not problem.is_open:
        return ()
    pool = [tuple(start) for start in starts if len(start) <= count]
    pool += [_shelves(problem, count), _improve(problem, (), count)]
    ranked = sorted(dict.fromkeys(pool), key=problem.total)
    improved = [_local_search(problem, start, count) for start in ranked[:2]]
    return tuple(sorted(min([*improved, ranked[0]], key=problem.total)))


def _improve(problem: GridProblem, chosen: tuple[Cell, ...], count: int) -> tuple[Cell, ...]:
    """Opens the bucket that saves most, again and again, up to `count` or until nothing is saved."""
    while len(chosen) < count:
        cell, gain = _best_addition(problem, chosen)
        if gain <= 0:
            break
        chosen = (*chosen, cell)
    return chosen


def _best_addition(problem: GridProblem, chosen: Iterable[Cell]) -> tuple[Cell, float]:
    gains = problem.gains(problem.served(chosen))
    at = np.unravel_index(int(np.argmax(gains)), gains.shape)
    return (int(at[0]), int(at[1])), float(gains[at])


def _shelves(problem: GridProblem, count: int) -> tuple[Cell, ...]:
    """The best ladder of shelves: batch sizes, each with seq sizes of its own, a step going to its batch's shelf.

    For every pair of neighbouring batch sizes the seq sizes are an exact one-axis problem; a second dynamic program
    shares the buckets out among the shelves.
    """
    batches = problem.weight.shape[0]
    best = np.full((batches + 1, count + 1), np.inf)
    best[0, 0] = 0.0
    origin: dict[tuple[int, int], tuple[int, int]] = {}
    ladders = {}
    for top in range(batches):
        cost = problem.cost[top]
        usable = np.flatnonzero(np.isfinite(cost))
        if len(usable) == 0:
            continue
        cost = cost[: usable[-1] + 1]
        for bottom in range(top + 1):
            shelf = problem.weight[bottom : top + 1]
            weight, base = shelf.sum(axis=0), float(np.sum(shelf * problem.base[bottom : top + 1]))
            # What the shelf cannot hold, and what is cheaper there, stays at its base cost.
            inside = np.flatnonzero(weight[: len(cost)])
            if len(inside) == 0:
                update = best[bottom] + base
                better = update < best[top + 1]
                for k in np.flatnonzero(better):
                    origin[top + 1, int(k)] = (bottom, 0)
                best[top + 1][better] = update[better]
                continue
            end = int(inside[-1]) + 1
            outside = float(np.sum(shelf[:, end:] * problem.base[bottom : top + 1, end:]))
            exact = solve_axis(cost[:end], weight[:end], count)
            ladders[bottom, top] = exact
            for used in range(count + 1):
                spent = base if used == 0 else exact.cost[used - 1] + outside
                update = best[bottom, : count + 1 - used] + spent
                target = best[top + 1, used:]
                for k in np.flatnonzero(update < target):
                    origin[top + 1, int(k) + used] = (bottom, used)
                np.minimum(update, target, out=target)
    if not np.isfinite(best[batches]).any():
        return ()
    position, left = batches, int(np.argmin(best[batches]))
    cells: list[Cell] = []
    while position > 0:
        bottom, used = origin[position, left]
        if used:
            cells += [(position - 1, j) for j in ladders[bottom, position - 1].ladder(used)]
        position, left = bottom, left - used
    return tuple(cells)


def lower_bound(problem: GridProblem, count: int, upper: float) -> float:
    """A cost that no choice of `count` buckets is below, given that one of cost `upper` is known.

    Subgradient ascent on the Lagrangian dual of "every point is served once".

    With a price λ_p ≤ w_p · base_p a point, L(λ) = Σ λ_p + the `count` least of ρ_j = Σ over the points that bucket j
    holds of min(0, w_p c_j - λ_p). L(λ) is a lower bound for every λ.
    """
    if count == 0 or not problem.is_open:
        return problem.total(())
    points, buckets = np.argwhere(problem.weight > 0), np.argwhere(np.isfinite(problem.floor))
    point_of = np.full(problem.weight.shape, -1)
    point_of[points[:, 0], points[:, 1]] = np.arange(len(points))
    # Pairs (point, bucket that holds it), bucket after bucket.
    held = [point_of[: i + 1, : j + 1].ravel() for i, j in buckets]
    held = [inside[inside >= 0] for inside in held]
    keep = [n for n, inside in enumerate(held) if len(inside)]
    if not keep:
        return problem.total(())
    buckets, held = buckets[keep], [held[n] for n in keep]
    starts = np.concatenate(([0], np.cumsum([len(inside) for inside in held])))
    point = np.concatenate(held)
    weight = problem.weight[points[:, 0], points[:, 1]]
    served = weight[point] * np.repeat(problem.floor[buckets[:, 0], buckets[:, 1]], np.diff(starts))
    ceiling = weight * problem.base[points[:, 0], points[:, 1]]

    prices = best_prices = ceiling.copy()
    best, scale, stalled = -np.inf, 1.0, 0
    for _ in range(_BOUND_STEPS):
        slack = np.minimum(served - prices[point], 0.0)
        rho = np.add.reduceat(slack, starts[:-1])
        opened = np.argsort(rho, kind="stable")[:count]
        opened = opened[rho[opened] < 0]
        value = float(prices.sum() + rho[opened].sum())
        if value > best:
            best, best_prices, stalled = value, prices, 0
        else:
            stalled += 1
            if stalled == _PATIENCE:
                scale, stalled, prices = scale / 2, 0, best_prices
                continue
        # One less the times a point is served; the base serves a point whose price is at its ceiling.
        gradient = np.ones(len(points))
        for n in opened:
            pairs = slice(starts[n], starts[n + 1])
            gradient[point[pairs][slack[pairs] < 0]] -= 1.0
        gradient[(prices >= ceiling) & (gradient > 0)] = 0.0
        # Steps in proportion to what a point can pay: demand is spread over orders of magnitude.
        move = gradient * ceiling
        if not np.any(move) or upper - value <= _CLOSE * upper:
            break
        prices = np.clip(prices + scale * (upper - value) / float(move @ gradient) * move, 0.0, ceiling)
    return min(best, upper)


def _local_search(problem: GridProblem, start: tuple[Cell, ...], count: int) -> tuple[Cell, ...]:
    """Closes each bucket in turn and opens the best in its place, until a sweep changes nothing."""
    chosen = _improve(problem, tuple(dict.fromkeys(start)), count)
    current = problem.total(chosen)
    for _ in range(_SWEEPS):
        before = current
        for cell in sorted(chosen):
            rest = tuple(other for other in chosen if other != cell)
            added, gain = _best_addition(problem, rest)
            trial = (*rest, added) if gain > 0 else rest
            cost = problem.total(trial)
            if cost < current * (1 - 1e-12) or (len(trial) < len(chosen) and cost <= current):
                chosen, current = trial, cost
        if current >= before * (1 - 1e-12):
            break
    return chosen
