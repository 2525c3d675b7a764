"""The elements of a row that an item has: those of every turn in which the group's items take the next ones.

Loops over them are unrolled, so that what is kept of each lies in registers, and reads do not wait for each other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from tvm.script.ir_builder import tirx as T

from llmc.compiler.targets.gpu.kernels.groups import calling, unrolled
from llmc.compiler.targets.reference.kernels.frame import Array, Expr, Frame, let, when

_MOST_KEPT = 64  # numbers of a row that an item keeps; beyond them it reads them again


class Strip:
    """width: of a row. together: neighbouring elements that an item takes at a time, a unit. units: of a row, if there
    are some behind its last element."""

    def __init__(self, k: Frame, width: int, together: int = 1, units: int = 0) -> None:
        self._k, self._width, self._together = k, width, together
        self._units = units or -(-width // together)
        self._turns = -(-self._units // calling(k).items)
        self.places = self._turns * together

    @contextmanager
    def each_unit(self) -> Iterator[tuple[Expr, Expr]]:
        """Loops over units: (turn, unit of the row)."""
        items = calling(self._k).items
        with ExitStack() as within:
            turn = within.enter_context(unrolled(self._turns))
            unit = let(turn * items + calling(self._k).item)
            if self._units % items:
                within.enter_context(when(unit < self._units))
            yield turn, unit

    @contextmanager
    def of_unit(self, turn: Expr, unit: Expr) -> Iterator[tuple[Expr, Expr, Expr]]:
        """Loops over elements of a unit: (place among the item's elements, element of the row, of the unit)."""
        with ExitStack() as within:
            part = within.enter_context(unrolled(self._together)) if self._together > 1 else T.int32(0)
            element = let(unit * self._together + part) if self._together > 1 else unit
            if self._units * self._together > self._width:
                within.enter_context(when(element < self._width))
            yield turn * self._together + part, element, part

    @contextmanager
    def each(self) -> Iterator[tuple[Expr, Expr]]:
        """Loops over elements: (place among the item's elements, element of the row)."""
        with self.each_unit() as (turn, unit), self.of_unit(turn, unit) as (place, element, _):
            yield place, element


class Kept:
    """What an item keeps of its elements of a row. read: the number of an element."""

    def __init__(self, strip: Strip, read: Callable[[Expr], Expr]) -> None:
        self._read = read
        self._numbers = Array(strip.places) if strip.places <= _MOST_KEPT else None
        if self._numbers is not None:
            with strip.each() as (place, element):
                self._numbers[place] = read(element)

    def get(self, place: Expr, element: Expr) -> Expr:
        return self._read(element) if self._numbers is None else self._numbers[place]
