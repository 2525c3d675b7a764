"""Exact Pareto-optimal choices of one option per layer: none is smaller at its cost or cheaper at its size."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Option:
    """nbytes: size of the layer. cost: its contribution to the divergence, not negative."""

    nbytes: int
    cost: float


@dataclass(frozen=True)
class _Stage:
    """Pareto-optimal partial choices up to a layer, smallest first. before: index of the extended choice in the
    previous stage. option: this layer's."""

    before: NDArray[np.int32]
    option: NDArray[np.int8]


class Frontier:
    """The Pareto front: each choice is the smallest among those of no higher cost. Smallest first. nbytes, cost: of
    each.

    It is exact: only dominated partial choices are dropped. The front has at most one entry per sum of bytes; layers
    have few different shapes, so there are few sums.
    """

    def __init__(self, layers: Sequence[Sequence[Option]], most: float = math.inf) -> None:
        """most: choices of higher cost are dropped."""
        nbytes, cost = np.zeros(1, np.int64), np.zeros(1)
        self._stages: list[_Stage] = []
        for options in layers:
            sizes = (nbytes[:, None] + np.array([option.nbytes for option in options], np.int64)).reshape(-1)
            costs = (cost[:, None] + np.array([option.cost for option in options])).reshape(-1)
            order = np.lexsort((costs, sizes))
            order = order[costs[order] <= most]
            ahead = np.minimum.accumulate(np.concatenate([[np.inf], costs[order]]))[:-1]
            order = order[costs[order] < ahead]
            nbytes, cost = sizes[order], costs[order]
            before, option = np.divmod(order, len(options))
            self._stages.append(_Stage(before.astype(np.int32), option.astype(np.int8)))
        self.nbytes, self.cost = nbytes, cost

    def __len__(self) -> int:
        return len(self.cost)

    def find(self, limit: float) -> int | None:
        """Index of the smallest choice of cost at most `limit`; None if there is none."""
        fits = np.flatnonzero(self.cost <= limit)
        return int(fits[0]) if len(fits) else None

    def choice(self, place: int) -> list[int]:
        """The option index of every layer in choice number `place`."""
        found = []
        for stage in reversed(self._stages):
            found.append(int(stage.option[place]))
            place = int(stage.before[place])
        return found[::-1]
