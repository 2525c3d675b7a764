"""Rule-based ladders, independent of traffic, with at most a given number of buckets: the baselines for plans.

ramp-up: lengths (step, step, max), like Intel Gaudi's default (block, block, max), coarsened until they are few enough.
ramp-up, tuned: the start also doubles from the block size, the step varies, and the best pair for the trace is taken.
This baseline is stronger than what a user without the trace would pick.
exponential: `ladder.exponential`.
Batches always start at 1. Ramp-up steps are in tokens, not blocks; otherwise few size counts could be met.
"""

from __future__ import annotations

from functools import lru_cache

from .ladder import exponential, ramp_up

FAMILIES = ("ramp-up", "ramp-up, tuned", "exponential")
_TUNED_STEPS = 8

Sizes = tuple[int, ...]


def length_ladders(family: str, count: int, maximum: int, unit: int) -> list[Sizes]:
    """The ladders of a family up to `maximum` that use up `count` sizes. unit: the block size."""
    if count == 1 or maximum <= unit:
        return [(maximum,)]
    if family == "exponential":
        return [_exponential(count, min(unit, maximum), maximum, unit)]
    step = -(-maximum // count)
    ladders = [ramp_up(min(step, maximum), step, maximum)]
    start = unit
    while family != "ramp-up" and start < maximum:
        ladders += [sizes for sizes in _ramp_up(start, count, maximum, _TUNED_STEPS) if len(sizes) <= count]
        start *= 2
    return ladders


def batch_ladders(family: str, count: int, maximum: int) -> list[Sizes]:
    """As `length_ladders`, for batches, starting at 1."""
    if count == 1 or maximum == 1:
        return [(maximum,)]
    return [_exponential(count, 1, maximum, 1)] if family == "exponential" else _ramp_up(1, count, maximum)


@lru_cache(maxsize=64)
def grid_ladders(family: str, count: int, max_batch: int, max_seq: int, unit: int) -> list[list[tuple[int, int]]]:
    """Every full grid of the family with at most `count` buckets, from few batches with many lengths to the reverse."""
    grids, seen = [], set()
    for rungs in range(1, min(count, max_batch) + 1):
        for batches in batch_ladders(family, rungs, max_batch):
            if batches in seen:
                continue
            seen.add(batches)
            for seqs in length_ladders(family, count // len(batches), max_seq, unit):
                grids.append([(batch, seq) for batch in batches for seq in seqs])
    return grids


def _ramp_up(start: int, count: int, maximum: int, variants: int = 1) -> list[Sizes]:
    """Ramp-up ladders from `start` with at most `count` sizes: the least step, then steps up to 1.5 times that."""
    # After n doublings the step is in (start · 2ⁿ⁻¹, start · 2ⁿ], which leaves count − n sizes for its multiples.
    for doublings in range(count):
        most = start << doublings
        step = max(most // 2 + 1 if doublings else start, -(-maximum // (count - doublings)))
        if step <= min(most, maximum):
            steps = {step + step * n // (2 * variants) for n in range(variants)}
            return [ramp_up(start, longer, maximum) for longer in sorted(steps) if longer <= maximum]
    return []


def _exponential(count: int, minimum: int, maximum: int, unit: int) -> Sizes:
    """The exponential ladder with the greatest limit that yields at most `count` sizes."""
    best: Sizes = (maximum,)
    for limit in range(2, 3 * count + 1):
        sizes = exponential(minimum, maximum, unit, limit)
        if len(best) <= len(sizes) <= count:
            best = sizes
    return best
