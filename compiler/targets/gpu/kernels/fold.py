"""Folds one number per item of a group into one, by a fixed tree, so that bits depend on nothing else.

The tree joins neighbours, then neighbouring pairs, and so on. Items that run in step, those of a warp or subgroup, pass
each other numbers without a barrier. How many do so changes where a number lies, and not which are joined.
"""

from __future__ import annotations

from collections.abc import Callable

from tvm.script.ir_builder import tirx as T

from llmc.compiler.targets.gpu.kernels.groups import Shared, calling, sync
from llmc.compiler.targets.reference.kernels.frame import Cell, Expr, Frame, is_nan, let, when

Combine = Callable[[Expr, Expr], Expr]
_MOST_LANES = 32  # items in step of which a fold makes use


def add(a: Expr, b: Expr) -> Expr:
    return a + b


def largest(a: Expr, b: Expr) -> Expr:
    """The larger float; NaN if either is NaN."""
    return T.Select(T.Or(a > b, is_nan(a)), a, b)


class Fold:
    """Shared memory in which the items' numbers are folded; reusable."""

    def __init__(self, k: Frame, combine: Combine, dtype: str = "float32") -> None:
        self._item, self._items = calling(k).item, calling(k).items
        self._combine, self._dtype = combine, dtype
        self._memory = Shared(self._items, dtype)

    def __call__(self, value: Expr) -> Expr:
        """The folded number, equal in every item. Every item of the group must call it."""
        memory, lanes = self._memory, T.call_pure_extern("int32", "llmc_lanes")
        own, step = Cell(value, self._dtype), 1
        while step < _MOST_LANES:
            # What a lane has that is no multiple of twice the step, no later step reads.
            with when(lanes > step):
                other = T.call_pure_extern(self._dtype, "llmc_of_lane", own.get(), T.int32(step))
                own.set(self._combine(own.get(), let(other, self._dtype)))
            step *= 2
        sync()
        with when(T.truncmod(self._item, lanes) == 0):
            memory[T.truncdiv(self._item, lanes)] = own.get()
        sync()
        step = 1
        while step < self._items:
            with when(lanes * step < self._items):
                at = let(self._item * (2 * step))
                with when(at * lanes < self._items):
                    memory[at] = self._combine(let(memory[at], self._dtype), let(memory[at + step], self._dtype))
                sync()
            step *= 2
        return let(memory[0], self._dtype)
