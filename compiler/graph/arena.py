"""Plans the arena: gives each result of a line of calls a place, reused after the result's last reader.

The choices equal those of TVM's `StaticPlanBlockMemory`, which is far slower: it rewrites a module per bucket.
"""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_RANGE = 16
"""A result reuses a place only if their sizes differ by at most this factor, as in TVM."""


@dataclass(frozen=True)
class ArenaPlan:
    """Places in the arena, and which result uses which.

    sizes: bytes of each place, numbered in order of first use.
    places: result number → place number.
    """

    sizes: tuple[int, ...]
    places: Mapping[int, int]


def plan_arena(
    calls: Sequence[tuple[Sequence[int], int]], uses: Sequence[int], sizes: Mapping[int, tuple[int, str]]
) -> ArenaPlan:
    """Assigns places to results.

    calls: (numbers read, number made) of each call, in order.
    uses: how often each number is read.
    sizes: result number → (bytes, dtype), for results that need a place. Only results of one dtype share a place.
    """
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
    """Takes the smallest free place that is large enough, else the largest, which then grows.

    Returns None if no free place is within a factor of `_RANGE` of `nbytes`.
    """
    at = bisect.bisect_left(free, (nbytes, -1, -1))
    if at == len(free) or free[at][0] > nbytes * _RANGE:
        at -= 1
        if at < 0 or free[at][0] < nbytes // _RANGE:
            return None
    return free.pop(at)[2]
