"""The two-dimensional problem: choose (batch, seq) buckets that minimize the cost of all steps.

A step (b, s) runs in the first open bucket, in the scheduler's order, with batch ≥ b and seq ≥ s. When none is open, it
runs at a base cost. For decode this is the largest bucket; for prefill, one sequence at a time in the longest bucket;
both are always open. At most K more buckets may be opened. Were each step free to take the cheapest bucket, this would
be the facility-location problem. `lower_bound` relaxes that further (Lagrangian relaxation, Cornuéjols, Fisher,
Nemhauser 1977), so the gap is known for every instance. `search` starts from greedy, from the best shelf ladder and
from given ladders, and improves the best two by local search. A bucket may also raise the cost, by taking steps from a
cheaper one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .exact import ExactLadders
from .exact import solve as solve_axis

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Cell = tuple[int, int]

BASE = -1
_BOUND_STEPS = 300
_PATIENCE = 8
_SWEEPS = 8
_CLOSE = 2e-4
# A relative gain below this is rounding error.
_NOTHING = 1e-9


@dataclass(frozen=True, slots=True)
class GridProblem:
    """Cells are (batch index, seq index) of ascending sizes; arrays are [batches, seqs], except load and floor_load.

    weight: steps that round up to the cell. cost: of any step in the cell's bucket; infinite if forbidden. load
    [batches of buckets, batches of steps]: additional cost of a step. rank: the scheduler's order of buckets, all
    distinct. floor, floor_load: lower bounds of cost and load over buckets and steps that round up to the cell. base:
    cost of a step that no open bucket holds. base_rank: an open bucket must rank below it to take the step.
    """

    weight: Floats
    cost: Floats
    load: Floats
    rank: Ints
    floor: Floats
    floor_load: Floats
    base: Floats
    base_rank: Ints

    @property
    def is_open(self) -> bool:
        """Whether there is demand, and a bucket that could be opened for it."""
        return bool(np.any(self.weight > 0) and np.isfinite(self.cost).any())

    def owners(self, cells: tuple[Cell, ...]) -> Ints:
        """For each cell, the index in `cells` of the bucket that serves its steps; BASE for none."""
        owner, ranks = np.full(self.weight.shape, BASE), self.base_rank.copy()
        for n, (i, j) in enumerate(cells):
            region = np.s_[: i + 1, : j + 1]
            taken = ranks[region] > self.rank[i, j]
            owner[region][taken] = n
            ranks[region][taken] = self.rank[i, j]
        return owner

    def served(self, cells: Iterable[Cell]) -> tuple[Floats, Ints]:
        """(cost of a step of each cell with `cells` open, rank of the serving bucket)."""
        price, ranks = self.base.copy(), self.base_rank.copy()
        for i, j in cells:
            region = np.s_[: i + 1, : j + 1]
            taken = ranks[region] > self.rank[i, j]
            np.copyto(price[region], self.cost[i, j] + self.load[i, : i + 1, None], where=taken)
            ranks[region][taken] = self.rank[i, j]
        return price, ranks

    def total(self, cells: Iterable[Cell]) -> float:
        """The cost of all demand with the buckets `cells` open."""
        return float(np.sum(self.weight * self.served(cells)[0]))

    def gains(self, price: Floats, ranks: Ints) -> Floats:
        """The gain, possibly negative, of opening each bucket, given `served`: [batches, seqs].

        Few distinct buckets serve, so what a new one would take from each is a cumulative sum over its cells.
        """
        saved, load = np.zeros_like(price), np.tril(self.load)
        for rank in np.unique(ranks[self.weight > 0]):
            steps = np.where(ranks == rank, self.weight, 0.0)
            by_batch = steps.cumsum(axis=1)
            paid = (steps * price).cumsum(axis=1).cumsum(axis=0)
            with np.errstate(invalid="ignore"):  # no step at infinite cost
                moved = by_batch.cumsum(axis=0) * self.cost
            if load.any():
                moved += load @ by_batch
            saved += np.where(self.rank < rank, paid - moved, 0.0)
        return np.where(np.isfinite(self.cost), saved, -np.inf)


def search(problem: GridProblem, count: int, starts: Iterable[tuple[Cell, ...]] = ()) -> tuple[Cell, ...]:
    """The best cells found, at most `count`; never costlier than one of `starts` of at most that size."""
    if count == 0 or not problem.is_open:
        return ()
    pool = [tuple(start) for start in starts if len(start) <= count]
    pool += [_shelves(problem, count), _improve(problem, (), count)]
    ranked = sorted(dict.fromkeys(pool), key=problem.total)
    improved = [_local_search(problem, start, count) for start in ranked[:2]]
    return tuple(sorted(min([*improved, ranked[0]], key=problem.total)))


def _improve(problem: GridProblem, chosen: tuple[Cell, ...], count: int) -> tuple[Cell, ...]:
    """Greedily opens the bucket with the largest gain, up to `count` or until nothing is gained."""
    while len(chosen) < count:
        cell, gain = _best_addition(problem, chosen)
        if gain <= 0:
            break
        chosen = (*chosen, cell)
    return chosen


def _best_addition(problem: GridProblem, chosen: Iterable[Cell]) -> tuple[Cell, float]:
    gains = problem.gains(*problem.served(chosen))
    at = np.unravel_index(int(np.argmax(gains)), gains.shape)
    gain = float(gains[at])
    return (int(at[0]), int(at[1])), gain if gain > _NOTHING * problem.total(chosen) else 0.0


def _shelves(problem: GridProblem, count: int) -> tuple[Cell, ...]:
    """The best ladder of shelves: batch sizes, each with its own seq sizes; a step goes to the shelf of its batch.

    For each pair of neighbouring batch sizes the seq sizes are an exact one-axis problem. A second dynamic program
    distributes the buckets over shelves. The base bucket is free on its shelf.
    """
    batches = problem.weight.shape[0]
    best = np.full((batches + 1, count + 1), np.inf)
    best[0, 0] = 0.0
    origin: dict[tuple[int, int], tuple[int, int]] = {}
    ladders: dict[tuple[int, int], tuple[ExactLadders, int]] = {}
    for top in range(batches):
        cost = problem.cost[top]
        usable = np.flatnonzero(np.isfinite(cost))
        if len(usable) == 0:
            continue
        cost = cost[: usable[-1] + 1]
        for bottom in range(top + 1):
            shelf = problem.weight[bottom : top + 1]
            weight, base = shelf.sum(axis=0), float(np.sum(shelf * problem.base[bottom : top + 1]))
            # Steps that the shelf cannot hold, or that are cheaper there, stay at base cost.
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
            free = int(problem.rank[top, end - 1] == problem.base_rank[top, end - 1])
            exact = solve_axis(cost[:end], weight[:end], count + free)
            ladders[bottom, top] = exact, free
            outside += float(shelf[:, :end].sum(axis=1) @ problem.load[top, bottom : top + 1])
            for used in range(count + 1):
                spent = exact.cost[used + free - 1] + outside if used + free else base
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
            exact, free = ladders[bottom, position - 1]
            sizes = exact.ladder(used + free)
            cells += [(position - 1, j) for j in sizes[: len(sizes) - free]]
        position, left = bottom, left - used
    return tuple(cells)


def lower_bound(problem: GridProblem, count: int, upper: float) -> float:
    """A lower bound on the cost of any `count` buckets, given a known solution of cost `upper`.

    Subgradient ascent on the Lagrangian dual of "every point is served once".

    With prices λ_p ≤ w_p · base_p per point, L(λ) = Σ λ_p + the sum of the `count` least ρ_j. Here ρ_j is the sum of
    min(0, w_p c_j - λ_p) over the points that bucket j holds. L(λ) is a lower bound for every λ.
    """
    if count == 0 or not problem.is_open:
        return problem.total(())
    points, buckets = np.argwhere(problem.weight > 0), np.argwhere(np.isfinite(problem.floor))
    point_of = np.full(problem.weight.shape, -1)
    point_of[points[:, 0], points[:, 1]] = np.arange(len(points))
    # Pairs (point, bucket that holds it), bucket by bucket.
    held = [point_of[: i + 1, : j + 1].ravel() for i, j in buckets]
    held = [inside[inside >= 0] for inside in held]
    keep = [n for n, inside in enumerate(held) if len(inside)]
    if not keep:
        return problem.total(())
    buckets, held = buckets[keep], [held[n] for n in keep]
    starts = np.concatenate(([0], np.cumsum([len(inside) for inside in held])))
    point = np.concatenate(held)
    weight = problem.weight[points[:, 0], points[:, 1]]
    opened_by = np.repeat(buckets, np.diff(starts), axis=0)
    least = problem.floor[opened_by[:, 0], opened_by[:, 1]] + problem.floor_load[opened_by[:, 0], points[point, 0]]
    served = weight[point] * least
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
        # 1 minus the number of times a point is served; the base serves a point whose price is at its ceiling.
        gradient = np.ones(len(points))
        for n in opened:
            pairs = slice(starts[n], starts[n + 1])
            gradient[point[pairs][slack[pairs] < 0]] -= 1.0
        gradient[(prices >= ceiling) & (gradient > 0)] = 0.0
        # Steps proportional to what a point can pay: demand spans orders of magnitude.
        move = gradient * ceiling
        if not np.any(move) or upper - value <= _CLOSE * upper:
            break
        prices = np.clip(prices + scale * (upper - value) / float(move @ gradient) * move, 0.0, ceiling)
    return min(best, upper)


def _local_search(problem: GridProblem, start: tuple[Cell, ...], count: int) -> tuple[Cell, ...]:
    """Closes each bucket in turn and opens the best replacement, until a sweep changes nothing."""
    chosen = _improve(problem, tuple(dict.fromkeys(start)), count)
    current = problem.total(chosen)
    for _ in range(_SWEEPS):
        before = current
        for cell in sorted(chosen):
            rest = tuple(other for other in chosen if other != cell)
            added, gain = _best_addition(problem, rest)
            trial = (*rest, added) if gain > 0 else rest
            cost = problem.total(trial)
            if cost < current * (1 - _NOTHING) or (len(trial) < len(chosen) and cost <= current * (1 + _NOTHING)):
                chosen, current = trial, cost
        if current >= before * (1 - _NOTHING):
            break
    return chosen
