"""Linear layers of few rows of x on tensor cores: weight rows stream through a ring of stages in shared memory.

All items of a group copy, and the ring is as deep as shared memory allows, so that memory always has enough to do. x
comes from caches, straight into registers, a stage before it is multiplied; a row that the layer norms itself, from
shared memory (`normed_row`).
"""

from __future__ import annotations

from collections.abc import Callable

from tvm.script.ir_builder import tirx as T

from llmc.compiler.dtypes import DTYPES
from llmc.compiler.targets.gpu.dependent import AWAIT
from llmc.compiler.targets.gpu.kernels.few_sums import FewSums
from llmc.compiler.targets.gpu.kernels.fragments import call
from llmc.compiler.targets.gpu.kernels.groups import Shared, all_of, calling, sync, turns
from llmc.compiler.targets.gpu.kernels.normed_row import NormedRow
from llmc.compiler.targets.gpu.kernels.row_tiles import Tile, row_tiles
from llmc.compiler.targets.gpu.kernels.tensor_sums import HALF, Layer
from llmc.compiler.targets.gpu.linear_forms import FewForm
from llmc.compiler.targets.gpu.tensor_cores import ITEMS, MATRIX_COLUMNS, MATRIX_ROWS, WARPS
from llmc.compiler.targets.reference.kernels.frame import Array, Expr, let, when

_BANKS_BYTES = 128  # that shared memory reads at a time
_WORDS = 4  # of a lane's part of a step of x
_LINE_BYTES = 128  # of the L2 cache


class _Ring:
    """Stages of the group's weight rows: [step][row][bytes of the step].

    Rows of a step that begin in the same banks as those of the step before change places, so that neither copies of one
    row's steps nor reads of one step's rows meet in a bank.
    """

    def __init__(self, of: Layer, form: FewForm, memory: Shared) -> None:
        self._of, self._form, self._memory = of, form, memory
        self._operand = of.weight.operand
        self._row_words = self._operand.step_bytes // 4
        self._mask = min(form.depth, _BANKS_BYTES // self._operand.step_bytes) - 1
        self.count = -(-of.layer.steps // form.depth)
        """Stages of a whole row."""

    def begin(self, row_of: Callable[[Expr], Expr]) -> None:
        """Sets the rows to be copied from now on. row_of: weight row, by its place in the group."""
        form, operand, item = self._form, self._operand, calling(self._of.k).item
        pieces = form.depth * operand.step_bytes // operand.copied
        self._total = form.weight_rows * pieces
        self._turns = []
        for done in range(0, self._total, ITEMS):
            index = let(item + done)
            place, at = let(T.truncdiv(index, pieces)), let(T.truncmod(index, pieces) * operand.copied)
            step, within = let(T.truncdiv(at, operand.step_bytes)), let(T.truncmod(at, operand.step_bytes))
            seat = T.bitwise_xor(place, T.bitwise_and(step, T.int32(self._mask)))
            to = let((step * form.weight_rows + seat) * self._row_words + T.truncdiv(operand.seat(place, within), 4))
            partial = self._total - done < ITEMS
            self._turns.append((index if partial else None, row_of(place), at, step, to))

    def copy(self, stage: Expr) -> None:
        """Asks for a stage, if the row has it; ends a group of copies either way."""
        form, operand, steps = self._form, self._operand, self._of.layer.steps
        with when(stage < self.count):
            begin = self._begin(stage)
            first = let(stage * form.depth)
            for index, row, at, step, to in self._turns:
                wanted = []
                if index is not None:
                    wanted.append(index < self._total)
                if steps % form.depth:
                    wanted.append(first + step < steps)
                with all_of(wanted):
                    address = operand.address(self._of.k, row, first, at)
                    call(f"llmc_copy{operand.copied}", self._memory.address(let(begin + to)), address)
        call("llmc_copies_end")

    def _begin(self, stage: Expr) -> Expr:
        return let(T.truncmod(stage, self._form.stages) * (self._form.stage_bytes // 4))

    def reader(self, stage: Expr, first: Expr, place: Expr) -> Callable[[int, int], Array]:
        """Gives a lane's part of a row, by the number of the warp's step and rows behind `place`, a multiple of 8.

        first: the warp's first step in the stage. place: of the lane's first row in the group.
        """
        rows, words = self._form.weight_rows, self._row_words
        begin = let(self._begin(stage) + first * (rows * words))
        seat = let(T.bitwise_xor(place, T.bitwise_and(first, T.int32(self._mask))))

        def read(step: int, behind: int) -> Array:
            found = Array(_WORDS, "uint32")
            turned = T.bitwise_xor(seat, T.int32(step & self._mask))
            at = let(begin + turned * words) + (step * rows + behind) * words
            self._operand.read(found, self._memory, at, self._of.lane, self._of.of_row)
            return found

        return read


class _RowsOfX:
    """A warp's part of x for a stage, in registers. Those of the next stage are on their way meanwhile: in registers of
    their own, or where the form lacks those, each step in the place of the one that was multiplied."""

    def __init__(self, of: Layer, form: FewForm, split: Expr) -> None:
        assert of.x.aligned  # a lane loads 16 bytes at a time
        self._of, self._form, self._split = of, form, split
        self._size = form.warp_steps * form.tiles * _WORDS
        self._now = Array(self._size, "uint32")
        self._next = self._now if form.x_in_place else Array(self._size, "uint32")

    def begin(self, tile: Tile) -> None:
        of_row = self._of.of_row
        self._rows = [
            tile.row(let(T.min(of_row + number * MATRIX_COLUMNS, tile.count - 1))) for number in range(self._form.tiles)
        ]

    def ahead(self) -> None:
        """Before the wait for earlier kernels, one of which writes x."""

    def arrive(self, busy: list[Expr]) -> None:
        """Behind the wait for earlier kernels: asks for the first stage. busy: conditions of warps that multiply."""
        with all_of(busy):
            self._load(T.int32(0))

    def enter(self, stage: Expr, count: int) -> None:
        """Before a stage is multiplied, of `count`."""
        if self._form.x_in_place:
            return
        self._take()
        with when(stage + 1 < count):
            self._load(let(stage + 1))

    def leave(self, stage: Expr, i: int, count: int) -> None:
        """Behind the warp's step `i` of a stage, of `count`."""
        if self._form.x_in_place:
            with when(stage + 1 < count):
                self._load_step(self._first_of(let(stage + 1)), i)

    def _first_of(self, stage: Expr) -> Expr:
        return let(stage * self._form.depth + self._split * self._form.warp_steps)

    def _load(self, stage: Expr) -> None:
        first = self._first_of(stage)
        for i in range(self._form.warp_steps):
            self._load_step(first, i)

    def _load_step(self, first: Expr, i: int) -> None:
        of, steps = self._of, self._of.layer.steps
        step = let(T.min(first + i, steps - 1)) if steps % self._form.depth else let(first + i)
        for number, row in enumerate(self._rows):
            of.x.load(of.k, self._next, self._at(i, number), row, step, of.lane)

    def _at(self, step: int, tile: int) -> int:
        return (step * self._form.tiles + tile) * _WORDS

    def _take(self) -> None:
        with T.unroll(self._size) as i:
            self._now[i] = self._next[i]

    def words(self, step: int, tile: int) -> list[Expr]:
        return [self._now[self._at(step, tile) + i] for i in range(_WORDS)]


def few_rows(of: Layer, rows: Expr, form: FewForm, memory: Shared) -> None:
    """Up to `form.most` rows of x: one unit is a group's columns of all rows."""
    k, layer, parts, stages = of.k, of.layer, of.parts, form.stages
    tiles = row_tiles(k, layer, rows, form)
    blocks = -(-of.columns // form.columns)
    unit_of_warp, split = let(T.truncmod(of.warp, form.units)), let(T.truncdiv(of.warp, form.units))
    ring = _Ring(of, form, memory)
    x = NormedRow(of, form, split, memory) if layer.normed else _RowsOfX(of, form, split)
    sums = FewSums(of, form, memory, unit_of_warp, split)
    busy = [] if form.units * form.splits == WARPS else [of.warp < form.units * form.splits]
    first = let(split * form.warp_steps)
    place = let(unit_of_warp * (parts * MATRIX_ROWS) + of.of_row)
    with calling(k).share_groups(let(tiles.count * blocks)) as unit:
        tile, column = tiles.at(let(T.truncdiv(unit, blocks))), let(T.truncmod(unit, blocks) * form.columns)

        def weight_row(at: Expr) -> Expr:
            """Units take neighbouring rows; with a gate, 16 of each part in turn."""
            block, within = let(T.truncdiv(at, MATRIX_ROWS)), let(T.truncmod(at, MATRIX_ROWS))
            of_part = let(T.min(column + T.truncdiv(block, parts) * MATRIX_ROWS + within, of.columns - 1))
            return let(tile.base + of_part + T.truncmod(block, parts) * of.columns)

        ring.begin(weight_row)
        x.begin(tile)
        sync()
        for ahead in range(stages - 1):
            ring.copy(let(T.int32(ahead)))
        _prefetch_planes(of, form, tile, column)
        x.ahead()
        # No kernel writes what was asked for so far. Which rows those of an expert are, only the index tells.
        if not of.layer.experts:
            call(AWAIT)
        x.arrive(busy)
        sums.begin(tile, column)
        with turns(k, ring.count) as stage:
            with all_of(busy):
                x.enter(stage, ring.count)
                sums.enter(stage)
            call(f"llmc_copies_wait<{stages - 2}>")
            sync()
            ring.copy(let(stage + (stages - 1)))
            with all_of(busy):
                sums.add_passed(stage)
                read = ring.reader(stage, first, place)
                for i in range(form.warp_steps):
                    step = let(stage * form.depth + first + i)
                    with all_of([step < layer.steps] if layer.steps % form.depth else []):
                        stored = [
                            [read(i, part * MATRIX_ROWS + half * HALF) for half in range(2)] for part in range(parts)
                        ]
                        sums.multiply(i, stored, x.words)
                    x.leave(stage, i, ring.count)
                    sums.end_step(stage, i)
        call("llmc_copies_wait<0>")
        sync()
        with all_of(busy):
            sums.share()
        sync()
        with all_of(busy):
            sums.end(ring.count)
            sums.write()


def _prefetch_planes(of: Layer, form: FewForm, tile: Tile, column: Expr) -> None:
    """Brings scales, zero points and offsets of the group's weight rows to the L2 cache, before they are needed."""
    if of.matrix is None:
        return
    item = calling(of.k).item
    for plane in of.matrix.planes:
        a_line = _LINE_BYTES // DTYPES[plane.dtype].item_bytes
        of_row = plane.count
        lines = -(-form.columns * of_row // a_line)
        for part in range(of.parts):
            base = let(tile.base + part * of.columns)
            begin, end = let((base + column) * of_row), let((base + of.columns) * of_row - 1)
            for done in range(0, lines, ITEMS):
                with all_of([item + done < lines] if lines - done < ITEMS else []):
                    at = let(T.min(begin + (item + done) * a_line, end))
                    call("llmc_prefetch", of.k.address(plane.name, at))
