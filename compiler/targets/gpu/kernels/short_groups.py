"""Short scale groups on tensor cores: each has one product or two, whose sum is scaled at once.

What a group has is added to the sum of its span, and spans are added in order. So sums of products live for a step
only, and warps that divide K pass each other a sum for every span instead of one for every group.

A value with an offset is number · scale − offset. So the sum of x over a group is needed once for each row of x: it is
a product, too, whose weight is all ones. Each lane then has it for the rows of x whose results it has.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext

from tvm.script.ir_builder import tirx as T

from llmc.compiler.targets.gpu.kernels.fma import fma
from llmc.compiler.targets.gpu.kernels.fragments import call, late
from llmc.compiler.targets.gpu.kernels.group_scales import GroupScales
from llmc.compiler.targets.gpu.kernels.groups import Shared, calling
from llmc.compiler.targets.gpu.tensor_cores import ITEMS, SPAN, TensorLayer
from llmc.compiler.targets.reference.kernels.frame import Array, Expr, Frame, let, when
from llmc.compiler.targets.reference.kernels.matrix import Matrix

_RESULTS = 4  # of a lane per product
_MOST_WORDS = 16  # of scales that a lane has twice
_ONES = {"bf16": 0x3F803F80, "f16": 0x3C003C00}
"""Pairs of ones."""
Fragment = tuple[Array, Array]
"""A lane's words of two weight rows, for two products."""


class ShortGroups:
    """The products of a step, and by what they are scaled. rows: of the weight that a lane has, two a fragment."""

    def __init__(self, layer: TensorLayer, rows: int) -> None:
        self._layer, self.rows = layer, rows
        self._products = [(0,), (2,)] if layer.halved else [(0, 2)]  # by group, its first words of a step
        size = layer.step_groups * rows
        self.scale = Array(size)
        """By group of the step and row."""
        self.less = Array(size) if layer.offsets else None
        """Minus the offsets."""
        self._chain, self._sum_of_x = Array(rows // 2 * _RESULTS), Array(_RESULTS)

    def add(self, fragments: Sequence[Fragment], x: Array | Sequence[Expr], to: Array, at: Sequence[Expr]) -> None:
        """Adds the groups of a step to sums of the span. x: a lane's words of a tile. at: of each fragment's results
        in `to`."""
        mma = f"llmc_mma_{self._layer.dtype}"
        for group, halves in enumerate(self._products):
            if self.less is not None:
                one = T.uint32(_ONES[self._layer.dtype])
                self._clear(self._sum_of_x, 0)
                for half in halves:
                    call(mma, self._sum_of_x.address(0), one, one, one, one, x[half], x[half + 1])
            for number, (low, high) in enumerate(fragments):
                first = number * _RESULTS
                self._clear(self._chain, first)
                for half in halves:
                    a = (low[half], high[half], low[half + 1], high[half + 1])
                    call(mma, self._chain.address(first), *a, x[half], x[half + 1])
                for result in range(_RESULTS):
                    row = group * self.rows + 2 * number + result // 2
                    place = at[number] + result
                    to[place] = fma(self._chain[first + result], self.scale[row], to[place])
                    if self.less is not None:
                        to[place] = fma(self.less[row], self._sum_of_x[result % 2], to[place])

    def _clear(self, sums: Array, first: int) -> None:
        for i in range(_RESULTS):
            sums[first + i] = T.float32(0.0)


class OwnScales:
    """For few rows of x: a lane loads the scales of its own weight rows.

    ahead: whether it does so while it multiplies the span before; of formats with many words, during that one's last
    step, where the registers are free.
    """

    def __init__(self, k: Frame, layer: TensorLayer, matrix: Matrix, to: ShortGroups) -> None:
        self._k, self._layer, self._to = k, layer, to
        self._scales = GroupScales(layer, matrix)
        self._size = to.rows * self._scales.words
        self.ahead = self._size <= _MOST_WORDS
        self._now = Array(self._size, "uint32")
        self._next = Array(self._size, "uint32") if self.ahead else self._now

    def load(self, rows: Sequence[Expr], span: Expr) -> None:
        """Asks for a span of weight rows."""
        for number, row in enumerate(rows):
            of = row if self.ahead else late(row)
            self._scales.load(self._k, self._next, number * self._scales.words, of, span)

    def take(self) -> None:
        """Goes on to the span that was asked for."""
        if self.ahead:
            with T.unroll(self._size) as i:
                self._now[i] = self._next[i]

    def enter(self, step: int) -> None:
        """Step `step` of the span is added next."""
        to = self._to
        for group in range(self._layer.step_groups):
            element = T.int32(step * self._layer.step + group * self._layer.short)
            for number in range(to.rows):
                at, first = group * to.rows + number, number * self._scales.words
                to.scale[at] = self._scales.scale(self._now, first, element)
                if to.less is not None:
                    to.less[at] = self._scales.less(self._now, first, element)


class SharedScales:
    """For many rows of x: each item has the scales of one of the group's weight rows, and puts them into shared memory.

    So no scale is taken apart twice, and registers have what a step needs. memory: words; of two spans from `begin` on,
    [span][group][row], with minus the offset beside each scale. rows: of the group.
    """

    def __init__(self, k: Frame, layer: TensorLayer, matrix: Matrix, rows: int, memory: Shared, begin: int) -> None:
        self._k, self._layer, self._rows, self._memory, self._first = k, layer, rows, memory, begin
        self._scales = GroupScales(layer, matrix)
        self._own = Array(self._scales.words, "uint32")
        self._each = 2 if layer.offsets else 1  # words of a group and row

    def begin(self, row_of: Callable[[Expr], Expr]) -> None:
        """Behind a barrier: gives the first span, and asks for the second. row_of: weight row, by its place."""
        self._row = row_of(let(T.min(calling(self._k).item, self._rows - 1)))
        self._load(T.int32(0))
        self.give(T.int32(0))

    def _load(self, span: Expr) -> None:
        self._scales.load(self._k, self._own, 0, late(self._row), span)

    def give(self, span: Expr) -> None:
        """Gives a span that was asked for to the steps behind the next barrier, and asks for the one behind it."""
        item = calling(self._k).item
        with when(item < self._rows) if self._rows < ITEMS else nullcontext():
            for group in range(SPAN // self._layer.short):
                element, at = T.int32(group * self._layer.short), self._at(span, T.int32(group), item)
                self._memory[at] = T.reinterpret("uint32", self._scales.scale(self._own, 0, element))
                if self._layer.offsets:
                    less = self._scales.less(self._own, 0, element)
                    self._memory[let(at + 1)] = T.reinterpret("uint32", less)
        self._load(let(span + 1))

    def _at(self, span: Expr, group: Expr, place: Expr) -> Expr:
        of_both = let(T.truncmod(span, 2) * (SPAN // self._layer.short) + group)
        return let((of_both * self._rows + place) * self._each + self._first)

    def enter(self, to: ShortGroups, step: Expr, places: Sequence[Expr]) -> None:
        """A step is added next. places: of the lane's weight rows in the group."""
        steps = self._layer.group_steps
        span, within = let(T.truncdiv(step, steps)), let(T.truncmod(step, steps) * self._layer.step_groups)
        for group in range(self._layer.step_groups):
            for number, place in enumerate(places):
                at, found = self._at(span, let(within + group), place), group * to.rows + number
                to.scale[found] = T.reinterpret("float32", self._memory[at])
                if to.less is not None:
                    to.less[found] = T.reinterpret("float32", self._memory[let(at + 1)])
