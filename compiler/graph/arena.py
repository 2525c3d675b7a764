"""Where the results of a line of calls lie in the arena: once its last reader has run, a place is taken over.

The choices are those of TVM's `StaticPlanBlockMemory`, which takes far longer: it rewrites a module for every bucket.
"""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_RANGE = 16
"""A place is taken over by what is at most so many times smaller or larger."""


@dataclass(frozen=True)
class ArenaPlan:
    """sizes: bytes of each place in the order in which they are first taken. places: of each result, by its number."""

    sizes: tuple[int, ...]
    places: Mapping[int, int]


def plan_arena(
    calls: Sequence[tuple[Sequence[int], int]], uses: Sequence[int], sizes: Mapping[int, tuple[int, str]]
) -> ArenaPlan:
    """calls: (what each reads, what it makes), by number. uses: how often each number is read. sizes: (bytes, dtype) of
    those that have a place; places are shared by one dtype."""
    left = {number: uses[number] + 1 for number in sizes}
    free: dict[str, list[tuple[int, int, int]]] = defaultdict(list)  # (bytes, when it became free, place), ascending
    totals: list[int] = []
    places: dict[int, int] = {}
    freed = 0
    for reads, out in calls:
        if out in left:
            nbytes, dtype = sizes[out]
            place = _taken(free[dtype], nbytes)
            if place is None:
                place = len(totals)
                totals.append(nbytes)
            places[out], totals[place] = place, max(totals[place], nbytes)
        for number in (*reads, out):
            if number in left:
                left[number] -= 1
                if not left[number]:
                    place = places[number]
                    bisect.insort(free[sizes[number][1]], (totals[place], freed, place))
                    freed += 1
    return ArenaPlan(tuple(totals), places)


def _taken(free: list[tuple[int, int, int]], nbytes: int) -> int | None:
    """The smallest free place that is large enough, else the largest, which grows; None where none is of about that
    size."""
    at = bisect.bisect_left(free, (nbytes, -1, -1))
    if at == len(free) or free[at][0] > nbytes * _RANGE:
        at -= 1
        if at < 0 or free[at][0] < nbytes // _RANGE:
            return None
    return free.pop(at)[2]
