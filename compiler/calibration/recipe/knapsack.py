"""The best choice of one option for each layer: no other one is smaller at the same cost, or costs less at its size."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Option:
    """nbytes: what a layer takes. cost: what it adds to the divergence, not negative."""

    nbytes: int
    cost: float


@dataclass(frozen=True)
class _Stage:
    """After a layer: the choices that are worth something so far, smallest first. before: the one of the layer before
    that each goes on from; option: what it takes of this layer."""

    before: NDArray[np.int32]
    option: NDArray[np.int8]


class Frontier:
    """Every choice that is the smallest of those that cost no more, smallest first. nbytes, cost: of each.

    It is exact: of two partial choices that are followed neither is at least as small and as cheap as the other. There
    are at most as many as sums of bytes, which few different shapes of layers make few.
    """

    def __init__(self, layers: Sequence[Sequence[Option]], most: float = math.inf) -> None:
        """most: choices that cost more are not followed."""
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
        """The smallest choice that costs no more than `limit`; None where there is none."""
        fits = np.flatnonzero(self.cost <= limit)
        return int(fits[0]) if len(fits) else None

    def choice(self, place: int) -> list[int]:
        """The option of every layer."""
        found = []
        for stage in reversed(self._stages):
            found.append(int(stage.option[place]))
            place = int(stage.before[place])
        return found[::-1]
