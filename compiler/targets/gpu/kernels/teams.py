"""Neighbouring items of a group that share work, a team, and sums over them.

A sum joins neighbours, then neighbouring pairs, and so on, in one tree that depends on nothing but the team's size.
Where the items of a team run in step, they pass each other numbers without a barrier. Otherwise those that do add up
theirs, and each item adds the sums of the others, with one barrier.
"""

from __future__ import annotations

from collections.abc import Sequence

from tvm.script.ir_builder import tirx as T

from llmc.compiler.targets.gpu.kernels.groups import Shared, calling, sync, unrolled
from llmc.compiler.targets.reference.kernels.frame import Array, Cell, Expr, Frame, let, when


class Team:
    """The item's team. size: a power of two, at most 32, which divides the group's items. numbers: the most that are
    added at a time."""

    def __init__(self, k: Frame, size: int, numbers: int) -> None:
        self._size, self._numbers, self._item, self._items = size, numbers, calling(k).item, calling(k).items
        self.number, self.member = let(T.truncdiv(self._item, size)), let(T.truncmod(self._item, size))
        # Calls take turns with two parts, so that nobody waits until others have read what they need of the last one.
        self._memory, self._part = Shared(2 * numbers * self._items), Cell(T.int32(0), "int32")

    def add(self, numbers: Sequence[Cell]) -> None:
        """Makes each float32 number the sum of those of the team, for every item of it. Every item of the group calls
        it."""
        lanes = T.call_pure_extern("int32", "llmc_lanes")
        for step in self._steps():
            with when(lanes > step):
                for own in numbers:
                    other = let(T.call_pure_extern("float32", "llmc_of_lane", own.get(), T.int32(step)), "float32")
                    own.set(own.get() + other)
        with when(lanes < self._size):
            self._part.set(self._numbers * self._items - self._part.get())
            places = [let(self._part.get() + i * self._items) for i in range(len(numbers))]
            for place, own in zip(places, numbers, strict=True):
                self._memory[place + self._item] = own.get()
            sync()
            for place, own in zip(places, numbers, strict=True):
                own.set(self._added(let(place + self.number * self._size), lanes))

    def _steps(self) -> list[int]:
        return [1 << level for level in range(self._size.bit_length() - 1)]

    def _added(self, first: Expr, lanes: Expr) -> Expr:
        """The sum of a team's numbers in memory. Items in step have added theirs already, and all have the sum."""
        sums = Array(self._size)
        with unrolled(self._size) as i:
            sums[i] = self._memory[first + i]
        for step in self._steps():
            with when(lanes <= step):
                for i in range(0, self._size, 2 * step):
                    sums[i] = sums[i] + sums[i + step]
        return sums[0]
