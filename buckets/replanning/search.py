"""Finds the cheapest set of buckets to add and retire within a budget, given the scheduler's choice of buckets."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from llmc.buckets.bucket import Bucket

from .shapes import Limits, StepShape

EXACT_SETS = 2000
"""Up to this many sets of additions all are evaluated; beyond, a local search is used."""
_EXACT_RETIREMENTS = 200
Cost = Callable[[StepShape, Bucket], float]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class SearchBudget:
    """Limits of a plan. graphs: buckets on afterwards. added: new buckets. amounts: most of each resource that
    additions use together."""

    graphs: int
    added: int
    amounts: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Found:
    """Ascending bucket indices. total: cost of all steps afterwards. price: of the additions."""

    added: tuple[int, ...]
    retired: tuple[int, ...]
    total: float
    price: float

    @property
    def value(self) -> float:
        """The quantity to minimize."""
        return self.total + self.price


class Choices:
    """Costs of given steps for any set of buckets; the scheduler decides where each step runs.

    cost: of a step in a bucket that holds it. A step that no bucket of a set holds costs what its parts cost in the
    buckets of `base`.
    """

    def __init__(
        self, shapes: Sequence[StepShape], steps: Sequence[float], buckets: Sequence[Bucket], base: Iterable[int],
        limits: Limits, cost: Cost,
    ) -> None:  # fmt: skip
        self.shapes, self.buckets, self.base, self.limits = tuple(shapes), tuple(buckets), frozenset(base), limits
        self.steps = np.array(steps, np.float64)
        self._groups = []
        there = [self.buckets[n] for n in sorted(self.base)]
        for phase in sorted({shape.phase for shape in shapes}):
            rows = [n for n, shape in enumerate(shapes) if shape.phase == phase]
            order = sorted(range(len(buckets)), key=lambda n: limits.order(buckets[n], phase))
            matrix = np.full((len(rows), len(order)), math.inf)
            missed = np.zeros(len(rows))
            for i, n in enumerate(rows):
                for j, m in enumerate(order):
                    if limits.holds(buckets[m], shapes[n]):
                        matrix[i, j] = cost(shapes[n], buckets[m])
                missed[i] = sum(cost(part, bucket) for part, bucket in limits.parts(there, shapes[n]))
            self._groups.append((np.array(rows), np.array(order), matrix, missed))

    def each(self, on: Iterable[int]) -> tuple[Floats, npt.NDArray[np.int64]]:
        """Per shape: the cost of one step with this set of buckets, and the index of its bucket (−1 for none)."""
        mask = np.zeros(len(self.buckets), bool)
        mask[list(on)] = True
        costs, owners = np.zeros(len(self.shapes)), np.full(len(self.shapes), -1, np.int64)
        for rows, order, matrix, missed in self._groups:
            columns = np.flatnonzero(mask[order])
            if not len(columns):
                costs[rows] = missed
                continue
            mine = matrix[:, columns]
            held = np.isfinite(mine)
            first = np.argmax(held, axis=1)
            some = held[np.arange(len(rows)), first]
            costs[rows] = np.where(some, mine[np.arange(len(rows)), first], missed)
            owners[rows] = np.where(some, order[columns][first], -1)
        return costs, owners

    def total(self, on: Iterable[int]) -> float:
        """The cost of all steps with this set of buckets."""
        return float(self.each(on)[0] @ self.steps)


def search(
    choices: Choices, candidates: Sequence[int], prices: Sequence[float], amounts: Sequence[Sequence[float]],
    budget: SearchBudget, keep: Iterable[int] = (),
) -> Found:  # fmt: skip
    """The additions of least total cost and price, and the retirements needed to fit the budget.

    prices, amounts: per candidate; amounts has one number per resource of the budget. keep: never retired. A bucket is
    retired only if a remaining bucket of the base holds everything it holds. Exhaustive if sets are few; otherwise adds
    and swaps one at a time. Never worse than no change, if that fits.
    """
    fixed: frozenset[int] = frozenset(keep)
    price = dict(zip(candidates, prices, strict=True))
    amount = dict(zip(candidates, amounts, strict=True))
    limits, buckets, base = choices.limits, choices.buckets, choices.base
    coverers = {r: frozenset(b for b in base if b != r and limits.covers(buckets[b], buckets[r])) for r in base - fixed}

    def fits(added: Sequence[int]) -> bool:
        if len(added) > budget.added:
            return False
        sums = (math.fsum(amount[n][k] for n in added) for k in range(len(budget.amounts)))
        return all(used <= most for used, most in zip(sums, budget.amounts, strict=True))

    def try_set(added: Sequence[int]) -> Found | None:
        if not fits(added):
            return None
        excess = len(base) + len(added) - budget.graphs
        retired = _retire(choices, frozenset(added), max(0, excess), coverers)
        if retired is None:
            return None
        on = (base - set(retired)) | set(added)
        return Found(tuple(sorted(added)), retired, choices.total(on), math.fsum(price[n] for n in added))

    best = try_set(()) or Found((), (), choices.total(base), 0.0)
    most = min(budget.added, len(candidates))
    if sum(math.comb(len(candidates), k) for k in range(most + 1)) <= EXACT_SETS:
        for k in range(1, most + 1):
            for added in itertools.combinations(candidates, k):
                best = _better(best, try_set(added))
        return best
    return _by_turns(best, candidates, try_set)


def _by_turns(best: Found, candidates: Sequence[int], try_set: Callable[[Sequence[int]], Found | None]) -> Found:
    while True:
        before = best
        have = before.added
        for n in candidates:
            if n not in have:
                best = _better(best, try_set((*have, n)))
        if best is before:
            for out, n in itertools.product(have, candidates):
                if n not in have:
                    best = _better(best, try_set((*(m for m in have if m != out), n)))
        if best is before:
            return best


def _better(best: Found, other: Found | None) -> Found:
    """The better one; the first if equal."""
    if other is None or other.value >= best.value - 1e-12 * abs(best.value):
        return best
    return other


def _retire(
    choices: Choices, added: frozenset[int], count: int, coverers: dict[int, frozenset[int]]
) -> tuple[int, ...] | None:
    """`count` buckets of the base whose loss costs least; None if fewer may be retired."""
    if count == 0:
        return ()
    base: frozenset[int] = choices.base

    def may(retired: frozenset[int]) -> bool:
        return all(coverers[r] - retired for r in retired)

    able = sorted(r for r, others in coverers.items() if others)
    if len(able) < count:
        return None
    if math.comb(len(able), count) <= _EXACT_RETIREMENTS:
        sets = [frozenset(one) for one in itertools.combinations(able, count) if may(frozenset(one))]
        if not sets:
            return None
        least = min(sets, key=lambda one: (choices.total((base - one) | added), sorted(one)))
        return tuple(sorted(least))
    gone: frozenset[int] = frozenset()
    for _ in range(count):
        options = [gone | {r} for r in able if r not in gone and may(gone | {r})]
        if not options:
            return None
        gone = min(options, key=lambda one: (choices.total((base - one) | added), sorted(one)))
    return tuple(sorted(gone))
