"""Checks a cost table: finds costs that fall where they must grow, and costs measured under load.

A replay with no fewer sequences, tokens and context, in a bucket no smaller, cannot take less time, except for noise.
Noise explains a quarter, or the spread of the two costs' repeats, but never more than half. A table is refused if a
smaller load took more than TOLERANCE to MOST times as long as a larger one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .cost_table import CostTable, CostTableError, ReplayCost

TOLERANCE, MOST = 1.25, 2.0
# Both means lie within this many standard errors, with probability 99 % for many repeats.
_STANDARD_ERRORS = 2.6


@dataclass(frozen=True, slots=True)
class Fall:
    """Two costs of one phase: `more` has at least the load and bucket of `less`, but takes far less time."""

    less: ReplayCost
    more: ReplayCost

    @property
    def ratio(self) -> float:
        """Time of the smaller load divided by that of the larger."""
        return self.less.seconds / self.more.seconds

    def __str__(self) -> str:
        words = []
        for cost in (self.less, self.more):
            load = f"{cost.sequences} x {cost.tokens // cost.sequences} tokens, context {cost.context}"
            words.append(f"{cost.bucket} ({load}) took {_duration(cost.seconds)}")
        return f"{words[0]} and the larger {words[1]}"


def falls(costs: Sequence[ReplayCost]) -> list[Fall]:
    """For each falling cost, the pair in which it falls most; worst first."""
    found = [fall for phase in sorted({c.bucket.phase for c in costs}) for fall in _falls_of(costs, phase)]
    return sorted(found, key=lambda fall: (-fall.ratio, fall.less, fall.more))


def refuse_falls(table: CostTable, name: str) -> None:
    """Raises CostTableError, naming the worst pair, for a table whose costs fall as batch or length grows."""
    found = falls(table.costs)
    if found:
        raise CostTableError(
            f"the costs of {name} fall as buckets grow: {found[0]}; measure again with llmc warmup --again"
        )


def doubtful(table: CostTable) -> tuple[ReplayCost, ...]:
    """Costs to measure again: those under load, and both of each falling pair."""
    pairs = {cost for fall in falls(table.costs) for cost in (fall.less, fall.more)}
    return tuple(cost for cost in table.costs if cost.under_load or cost in pairs)


def trusted(costs: Sequence[ReplayCost]) -> tuple[tuple[ReplayCost, ...], str]:
    """The costs to predict from, and a sentence on those measured under load (empty if there are none).

    If at least half of a phase's buckets have undisturbed costs, its disturbed ones are dropped; otherwise all are
    used.
    """
    kept: list[ReplayCost] = []
    for phase in sorted({cost.bucket.phase for cost in costs}):
        mine = [cost for cost in costs if cost.bucket.phase == phase]
        clean = [cost for cost in mine if not cost.under_load]
        enough = 2 * len({cost.bucket for cost in clean}) >= len({cost.bucket for cost in mine})
        kept += clean if enough else mine
    under_load = [cost for cost in costs if cost.under_load]
    if not under_load:
        return tuple(kept), ""
    used = sum(cost.under_load for cost in kept)
    most = max(cost.disturbed for cost in under_load)
    fate = "left out" if used == 0 else "used" if used == len(under_load) else f"{used} of them used"
    return tuple(kept), (
        f"{len(under_load)} of {len(costs)} costs were measured while other programs took up to {most:.0%} of the "
        f"machine, and are {fate}: run llmc warmup again when it is idle"
    )


def _falls_of(costs: Sequence[ReplayCost], phase: str) -> Iterator[Fall]:
    mine = [cost for cost in costs if cost.bucket.phase == phase]
    sizes = np.array([(c.bucket.batch, int(c.bucket.each), c.sequences, c.tokens, c.context) for c in mine], np.int64)
    seconds = np.array([c.seconds for c in mine])
    errors = np.array([_STANDARD_ERRORS * c.deviation_s / math.sqrt(c.repeats) / c.seconds for c in mine])
    for index, cost in enumerate(mine):
        larger = np.all(sizes >= sizes[index], axis=1)
        ratio = np.where(larger, cost.seconds / seconds, 0.0)
        allowed = np.clip(_spread(errors[index], errors), TOLERANCE, MOST)
        if np.any(ratio > allowed):
            yield Fall(cost, mine[int(np.argmax(np.where(ratio > allowed, ratio, 0.0)))])


def _spread(one: float, others: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """The ratio of two means that their relative errors can explain."""
    return np.asarray((1 + one) / np.maximum(1 - others, 1e-9), np.float64)


def _duration(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"
