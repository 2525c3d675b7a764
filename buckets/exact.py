"""The best ladder along one axis, exactly.

Candidate sizes ascend. Candidate j has demand weight w_j, the steps that round up to it, and costs c_j per step. A
ladder i₁ < i₂ < … < last serves the demand between two of its sizes by the upper one. So its cost is the sum of c_j ·
(W_j - W_i) over neighbours i < j, with W the running sum of w. A candidate that costs no less than a larger one is
never needed, so c may be assumed ascending. Then c_j · (W_j - W_i) satisfies the quadrangle inequality: for p ≤ q ≤ r ≤
s, cost(p, r) + cost(q, s) - cost(p, s) - cost(q, r) = (c_r - c_s) · (W_q - W_p) ≤ 0. Hence the best predecessor never
moves back as j grows. So a layer of the dynamic program takes O(m log m) by divide and conquer instead of O(m²). All
nodes of one level of the division are worked at once.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

_DENSE = 384


@dataclass(frozen=True, slots=True)
class ExactLadders:
    """Optimal ladders of 1 … K sizes over the same candidates; all include the last candidate.

    cost[k - 1]: the least cost with at most k sizes.
    """

    cost: Floats
    _choice: list[Ints]
    _kept: Ints

    def ladder(self, count: int) -> tuple[int, ...]:
        """Ascending candidate indices of an optimal ladder of at most `count` sizes."""
        layer = min(count, len(self._choice)) - 1
        picked, position = [], len(self._kept)
        while position > 0:
            picked.append(int(self._kept[position - 1]))
            position = int(self._choice[max(layer, 0)][position])
            layer -= 1
        return tuple(reversed(picked))


def solve(cost: Floats, weight: Floats, max_count: int) -> ExactLadders:
    """Finds optimal ladders with 1 … max_count sizes, for candidate costs [m] and demand weights [m] ≥ 0.

    Every ladder includes the last candidate, whose cost must be finite; candidates of infinite cost are dropped.
    """
    # Undominated candidates: cheaper than every larger one.
    cheapest_above = np.append(np.minimum.accumulate(cost[::-1])[::-1][1:], np.inf)
    kept = np.flatnonzero(cost < cheapest_above)
    if len(kept) == 0 or kept[-1] != len(cost) - 1:
        kept = np.append(kept, len(cost) - 1)
    c = cost[kept]
    total = np.concatenate(([0.0], np.cumsum(weight)[kept]))
    best = np.concatenate(([0.0], c * total[1:]))
    choices = [np.zeros(len(c) + 1, np.int64)]
    costs = [best[-1]]
    layer = _dense_layer if len(c) <= _DENSE else _divided_layer
    for _ in range(1, min(max_count, len(c))):
        best, choice = layer(best, c, total)
        choices.append(choice)
        costs.append(best[-1])
    costs += [costs[-1]] * (max_count - len(costs))
    return ExactLadders(np.array(costs), choices, kept)


def _dense_layer(best: Floats, c: Floats, total: Floats) -> tuple[Floats, Ints]:
    """One more size, over all pairs: next[j] = min over i < j of best[i] + c_j (W_j - W_i), and the minimizing i."""
    values = best[None, :] + c[:, None] * (total[1:, None] - total[None, :])
    values[np.arange(len(best))[None, :] > np.arange(len(c))[:, None]] = np.inf
    choice = np.argmin(values, axis=1)
    return _prefixed(values[np.arange(len(c)), choice], choice)


def _divided_layer(best: Floats, c: Floats, total: Floats) -> tuple[Floats, Ints]:
    """As `_dense_layer`, by divide and conquer: the choice at the middle bounds those on both sides."""
    m = len(c)
    values, choice = np.empty(m), np.empty(m, np.int64)
    low, high = np.array([0]), np.array([m])  # targets [low, high)
    first, last = np.array([0]), np.array([m - 1])  # their choices, inclusive
    while len(low):
        middle = (low + high) // 2
        ends = np.minimum(last, middle)
        lengths = ends - first + 1
        offsets = np.concatenate(([0], np.cumsum(lengths)[:-1]))
        node = np.repeat(np.arange(len(middle)), lengths)
        source = np.arange(int(lengths.sum())) - offsets[node] + first[node]
        target = middle[node]
        candidates = best[source] + c[target] * (total[target + 1] - total[source])
        least = np.minimum.reduceat(candidates, offsets)
        # The first position where each node attains its minimum.
        hits = np.flatnonzero(candidates == least[node])
        found = np.empty(len(middle), np.int64)
        found[node[hits[::-1]]] = source[hits[::-1]]
        values[middle], choice[middle] = least, found
        low, high = np.concatenate((low, middle + 1)), np.concatenate((middle, high))
        first, last = np.concatenate((first, found)), np.concatenate((found, last))
        some = low < high
        low, high, first, last = low[some], high[some], first[some], last[some]
    return _prefixed(values, choice)


def _prefixed(values: Floats, choice: Ints) -> tuple[Floats, Ints]:
    """Prepends the empty prefix, which costs nothing."""
    return np.concatenate(([0.0], values)), np.concatenate(([0], choice)).astype(np.int64)
