"""How results of partitions are folded, in order: equally by a group that computes all, and by `attention_merge.py`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from tvm.script.ir_builder import tirx as T

from llmc.compiler.targets.gpu.kernels.exponential import exp_negative
from llmc.compiler.targets.gpu.kernels.fma import fma
from llmc.compiler.targets.gpu.kernels.groups import calling
from llmc.compiler.targets.gpu.launch import ITEMS
from llmc.compiler.targets.reference.kernels.frame import Cell, Expr, Frame, let, when

LEAST = -3.0e38
"""Maximum over no scores: below every score that is a number."""
_Found = TypeVar("_Found")


def later_maximum(top: Expr, most: Expr) -> Expr:
    """The maximum of a result behind one more partition, whose own is `most`."""
    return let(T.max(top, most), "float32")


def scaled(from_maximum: Expr, to_maximum: Expr) -> Expr:
    """What sums relative to one maximum are multiplied by to be relative to another."""
    return exp_negative(let(from_maximum - to_maximum, "float32"))


def joined(total: Expr, keep: Expr, weight: Expr) -> Expr:
    """A sum of weights, and the weight of a score without values."""
    return total * keep + weight


def folded(total: Expr, keep: Expr, more: Expr, gain: Expr) -> Expr:
    """A sum of earlier partitions and one of the next."""
    return fma(total, keep, let(more * gain, "float32"))


class Sums:
    """One number for each row and each element of the values; an item holds every 64th element."""

    def __init__(self, k: Frame, rows: int, width: int) -> None:
        self._k, self._width = k, width
        self._cells = [[Cell(T.float32(0.0)) for _ in range(-(-width // ITEMS))] for _ in range(rows)]

    def clear(self) -> None:
        for row in self._cells:
            for cell in row:
                cell.set(T.float32(0.0))

    def cells(self, row: int) -> Sequence[Cell]:
        """This item's sums of a row, by element."""
        return self._cells[row]

    def of_elements(self, find: Callable[[Expr], _Found]) -> list[_Found]:
        """What `find` makes of each element of this item; behind the last element, of that one."""
        item, turns = calling(self._k).item, len(self._cells[0])
        return [
            find(
                let(
                    item + turn * ITEMS
                    if (turn + 1) * ITEMS <= self._width
                    else T.min(item + turn * ITEMS, self._width - 1)
                )
            )
            for turn in range(turns)
        ]

    def each(self, row: int, body: Callable[[Expr, Cell], None]) -> None:
        """Calls body(element, its sum) for every element of this item."""
        item = calling(self._k).item
        for turn, cell in enumerate(self._cells[row]):
            element = let(turn * ITEMS + item)
            with when(element < self._width):
                body(element, cell)

    def fold(self, row: int, later: Sums, keep: Expr, gain: Expr) -> None:
        """Folds a partition's sums of a row into this result."""
        for cell, other in zip(self._cells[row], later._cells[row], strict=True):
            cell.set(folded(cell.get(), keep, other.get(), gain))
