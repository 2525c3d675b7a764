"""The row of x that a linear layer norms itself: all items of a group read it, and it lies in shared memory.

Its bits are those of `rms_norm`, in any group: a sum of squares is as many chains as that kernel has items, of which an
item here has two that are neighbours, the ones that the tree joins first.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from tvm.script.ir_builder import tirx as T

from llmc.compiler.targets.gpu.kernels.fma import fma
from llmc.compiler.targets.gpu.kernels.fold import Fold, add, largest
from llmc.compiler.targets.gpu.kernels.fragments import call
from llmc.compiler.targets.gpu.kernels.groups import Shared, all_of, calling, spread, sync, unrolled
from llmc.compiler.targets.gpu.kernels.row_tiles import Tile
from llmc.compiler.targets.gpu.kernels.rows import root_factor
from llmc.compiler.targets.gpu.kernels.tensor_sums import Layer
from llmc.compiler.targets.gpu.launch import items_of_row
from llmc.compiler.targets.gpu.linear_forms import FewForm
from llmc.compiler.targets.gpu.tensor_cores import STEP_BYTES
from llmc.compiler.targets.reference.kernels.frame import Array, Cell, Expr, is_nan, let, when
from llmc.compiler.targets.reference.kernels.rows_int8 import int8_number, int8_scales

_WORDS = 4  # of a lane's part of a step
_STEP_WORDS = STEP_BYTES // 4
_CHAINS = 2  # of an item
_NUMBERS = 4  # neighbours that a chain takes at a time, if they become a word of int8
_ONES = 0x01010101


class NormedRow:
    """A warp's part of x for a stage, in registers, from the group's normed row. split: as in `few_rows`."""

    def __init__(self, of: Layer, form: FewForm, split: Expr, memory: Shared) -> None:
        self._of, self._form, self._split, self._memory = of, form, split, memory
        self._begin = form.row_begin // 4
        self._together = _NUMBERS if of.int8 is not None else 1
        self._own = _CHAINS * self._together
        """Neighbouring elements that an item takes in a turn."""
        self._units = of.layer.width // self._own
        self._readers = min(items_of_row(of.layer.width) // _CHAINS, calling(of.k).items)
        """Items that read the row."""
        self._turns = -(-self._units // self._readers)
        self._squares = Fold(of.k, add)
        if of.int8 is not None:
            of.held = memory, self._begin
            self._largest, self._sum = Fold(of.k, largest), Fold(of.k, add, "int32")
        self._norm, self._x = (Array(self._own * self._turns, "uint32") for _ in range(2))
        self._words = Array(form.warp_steps * _WORDS, "uint32")

    @contextmanager
    def _each(self) -> Iterator[tuple[Expr, Expr]]:
        """Loops over an item's units: (place of the first element, unit of the row)."""
        item = calling(self._of.k).item
        with ExitStack() as within:
            turn = within.enter_context(unrolled(self._turns))
            unit = let(turn * self._readers + item)
            few = [item < self._readers] if self._readers < calling(self._of.k).items else []
            within.enter_context(all_of(few + ([unit < self._units] if self._units % self._readers else [])))
            yield turn * self._own, unit

    def _read(self, buffer: str, to: Array, first: Expr | int) -> None:
        at_once = min(self._own, _WORDS)
        with self._each() as (place, unit):
            for done in range(0, self._own, at_once):
                address = self._of.k.address(buffer, let(first + unit * self._own + done))
                call(f"llmc_load{4 * at_once}", to.address(place + done), address)

    def begin(self, tile: Tile) -> None:
        self._first = let(tile.row(T.int32(0)) * self._of.layer.width)

    def ahead(self) -> None:
        """Before the wait for earlier kernels: none writes the norm's weight."""
        self._read("norm", self._norm, 0)

    def arrive(self, busy: list[Expr]) -> None:
        """Behind the wait: norms the row. busy: conditions of warps that multiply; all others help."""
        of = self._of
        self._read("x", self._x, self._first)
        chains = [Cell(T.float32(0.0)) for _ in range(_CHAINS)]
        with self._each() as (place, _):
            for i in range(self._own):
                number, chain = (
                    let(T.reinterpret("float32", self._x[place + i]), "float32"),
                    chains[i // self._together],
                )
                chain.set(fma(number, number, chain.get()))
        # Items without chains have 0, which changes no sum of squares.
        squares = self._squares(let(chains[0].get() + chains[1].get(), "float32"))
        self._factor = root_factor(squares, of.layer.width, float(of.p["eps"]))
        if of.int8 is None:
            self._write_halves()
        else:
            self._write_int8()
        sync()

    def _value(self, place: Expr) -> Expr:
        """A normed number."""
        x, norm = (T.reinterpret("float32", one[place]) for one in (self._x, self._norm))
        return let(x * self._factor * norm, "float32")

    def _write_halves(self) -> None:
        # Rounds as `rms_norm` does, but that a NaN keeps no bits, which products would not keep either.
        rounded = f"llmc_rounded_{self._of.layer.dtype}"
        with self._each() as (place, unit):
            pair = [self._value(place + i) for i in range(2)]
            self._memory[let(self._begin + unit)] = T.call_pure_extern("uint32", rounded, *pair)

    def _write_int8(self) -> None:
        """As `rows._Int8Row` does."""
        of, matrix, item = self._of, self._of.matrix, calling(self._of.k).item
        assert of.int8 is not None
        assert matrix is not None
        sums = matrix.format.sums
        assert sums is not None
        found = Cell(T.float32(0.0))
        with self._each() as (place, _):
            for i in range(self._own):
                magnitude = let(T.abs(self._value(place + i)), "float32")
                with when(T.Or(magnitude > found.get(), is_nan(magnitude))):
                    found.set(magnitude)
        scale, inverse = int8_scales(self._largest(found.get()))
        behind = self._begin + of.int8.number_words
        with when(item == 0):
            self._memory[behind] = T.reinterpret("uint32", scale)
        total = Cell(T.int32(0), "int32")
        with self._each() as (place, unit):
            for one in range(_CHAINS):
                packed = Cell(T.int32(0), "int32")
                for i in range(_NUMBERS):
                    number = int8_number(self._value(place + (one * _NUMBERS + i)) * inverse)
                    packed.set(T.bitwise_or(packed.get(), T.shift_left(T.bitwise_and(number, T.int32(255)), 8 * i)))
                self._memory[let(self._begin + unit * _CHAINS + one)] = T.Cast("uint32", packed.get())
                total.set(total.get() + _sum_of(packed.get()))
        if of.int8.groups == 1:
            whole = self._sum(total.get())
            with when(item == 0):
                self._memory[behind + 1] = T.Cast("uint32", whole * sums.factor)
            return
        sync()  # the words of a group are of several items
        of_group = of.layer.length // _NUMBERS
        with spread(of.k, of.int8.groups) as group:
            total.set(T.int32(0))
            first = let(group * of_group)
            with T.serial(let(T.min(of_group, of.int8.number_words - first))) as word:
                held = let(T.Cast("int32", self._memory[let(self._begin + first + word)]))
                total.set(total.get() + _sum_of(held))
            self._memory[let(behind + 1 + group)] = T.Cast("uint32", total.get() * sums.factor)

    def enter(self, stage: Expr, count: int) -> None:
        """Before a stage is multiplied, of `count`."""
        layer, form = self._of.layer, self._form
        first = let(stage * form.depth + self._split * form.warp_steps)
        for i in range(form.warp_steps):
            step = let(T.min(first + i, layer.steps - 1)) if layer.steps % form.depth else let(first + i)
            # Of a halved step, a lane has a part of each half, as `Operand.load` gives it.
            parts = 2 if layer.halved else 1
            for part in range(parts):
                words, apart = _WORDS // parts, part * _STEP_WORDS // parts
                at = let(self._begin + step * _STEP_WORDS + self._of.lane * words + apart)
                call(f"llmc_load{4 * words}", self._words.address(i * _WORDS + part * words), self._memory.address(at))

    def leave(self, stage: Expr, i: int, count: int) -> None:
        """Behind the warp's step `i` of a stage: the row stays."""

    def words(self, step: int, tile: int) -> list[Expr]:
        return [self._words[step * _WORDS + i] for i in range(_WORDS)]


def _sum_of(word: Expr) -> Expr:
    """The sum of four numbers of int8, which is exact."""
    return let(T.call_pure_extern("int32", "llmc_dot4", word, T.int32(_ONES)))
