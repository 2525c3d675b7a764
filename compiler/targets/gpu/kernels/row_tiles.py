"""Tiles of rows of x that share a weight: of all rows of a layer, or of the rows of each expert."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

from tvm.script.ir_builder import tirx as T

from llmc.compiler.targets.gpu.kernels.groups import Shared, calling, sync
from llmc.compiler.targets.gpu.linear_forms import FewForm, Form
from llmc.compiler.targets.gpu.tensor_cores import ITEMS, TensorLayer
from llmc.compiler.targets.gpu.wgmma import WgmmaForm
from llmc.compiler.targets.reference.kernels.frame import Cell, Expr, Frame, let, when


@dataclass(frozen=True)
class Tile:
    """Rows that share a weight. base: the weight's first row. count: of rows, also of later tiles of this weight.

    row: the row of x, and of the result, at a place below `count`.
    """

    base: Expr
    count: Expr
    row: Callable[[Expr], Expr]


class RowTiles(ABC):
    """Tiles of up to `size` rows, of weights that have more than `above` and up to `most` rows. count: of tiles."""

    count: Expr

    @abstractmethod
    def at(self, number: Expr) -> Tile:
        """The tile of this number."""


class _AllRows(RowTiles):
    def __init__(self, rows: Expr, size: int, above: int, most: int) -> None:
        self._rows, self._size = rows, size
        wanted = T.Cast("int32", T.And(rows > above, rows <= most))
        self.count = let(T.truncdiv(rows + (size - 1), size) * wanted)

    def at(self, number: Expr) -> Tile:
        first = let(number * self._size)
        return Tile(T.int32(0), let(self._rows - first), lambda place: let(first + place))


class ExpertIndex:
    """What `expert_order` writes on this target.

    The number of (token, expert) pairs; each pair's expert; the pairs by expert; for each expert the number of pairs
    before its own, and the number of all listed pairs.
    """

    def __init__(self, k: Frame) -> None:
        self._k, self.pairs = k, let(k.raw("index", T.int32(0)))

    @property
    def listed(self) -> Expr:
        """Where the list of pairs begins."""
        return let(self.pairs + 1)

    @property
    def starts(self) -> Expr:
        """Where the experts' first places in that list begin."""
        return let(2 * self.pairs + 1)


class _ExpertRows(RowTiles):
    """Shared memory has for each expert the number of tiles of all experts up to it."""

    def __init__(self, k: Frame, layer: TensorLayer, size: int, above: int, most: int) -> None:
        self._k, self._size, self._experts, self._weight_rows = k, size, layer.experts, layer.rows
        self._index, self._ends = ExpertIndex(k), Shared(layer.experts, "int32")
        item, ends = calling(k).item, self._ends
        turns = range(0, self._experts, ITEMS)
        sync()  # TVM may have put this where something else was
        for turn in turns:
            expert = let(item + turn)
            with when(expert < self._experts):
                rows = let(self._start(expert + 1) - self._start(expert))
                wanted = T.Cast("int32", T.And(rows > above, rows <= most))
                ends[expert] = T.truncdiv(rows + (size - 1), size) * wanted
        reach = 1
        while reach < self._experts:
            sync()
            added = [self._before(let(item + turn), reach) for turn in turns]
            sync()
            for turn, more in zip(turns, added, strict=True):
                expert = let(item + turn)
                with when(expert < self._experts):
                    ends[expert] = ends[expert] + more
            reach *= 2
        sync()
        self.count = let(ends[self._experts - 1])

    def _start(self, expert: Expr) -> Expr:
        return self._k.raw("index", self._index.starts + expert)

    def _before(self, expert: Expr, reach: int) -> Expr:
        """The number that an expert `reach` before this one has; 0 where there is none."""
        found = Cell(T.int32(0), "int32")
        with when(T.And(expert >= reach, expert < self._experts)):
            found.set(self._ends[expert - reach])
        return found.get()

    def at(self, number: Expr) -> Tile:
        # The first expert up to which there are more tiles than `number`.
        expert = Cell(T.int32(0), "int32")
        reach = 1 << max(self._experts - 1, 1).bit_length() - 1
        while reach:
            last = let(T.min(expert.get() + reach, self._experts) - 1)
            with when(self._ends[last] <= number):
                expert.set(let(last + 1))
            reach //= 2
        of = let(expert.get())
        before = Cell(T.int32(0), "int32")
        with when(of > 0):
            before.set(self._ends[of - 1])
        first = let((number - before.get()) * self._size)
        start = let(self._start(of))
        listed = let(self._index.listed + start + first)
        count = let(self._start(of + 1) - start - first)
        return Tile(let(of * self._weight_rows), count, lambda place: let(self._k.raw("index", listed + place)))


def row_tiles(k: Frame, layer: TensorLayer, rows: Expr, form: Form | FewForm | WgmmaForm) -> RowTiles:
    """Tiles of the rows that a form is for. rows: of x, where experts do not share them."""
    size, above, most = form.x_rows, form.above, form.most
    return _ExpertRows(k, layer, size, above, most) if layer.experts else _AllRows(rows, size, above, most)
