"""Linear layers of many rows of x by Hopper's `wgmma`: the four warps of a group multiply 64 weight rows at a time.

The weight is the first operand, in registers, with the fragments of `mma.sync`: it is stored and unpacked alike. x is
the second one, in shared memory. A product has the elements of K that one of `mma.sync` has, at the same places. So a
sum is one chain along K, whatever the number of rows.

Products run by themselves. Meanwhile, warps store the next step of x and ask for later ones. While they unpack the
weight, products of the processor's other group run.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from tvm.script.ir_builder import tirx as T

from llmc.compiler.targets.gpu.dependent import AWAIT
from llmc.compiler.targets.gpu.kernels.fragments import LANES, call
from llmc.compiler.targets.gpu.kernels.groups import Shared, calling, sync
from llmc.compiler.targets.gpu.kernels.row_tiles import Tile, row_tiles
from llmc.compiler.targets.gpu.kernels.staged import Staged
from llmc.compiler.targets.gpu.kernels.tensor_sums import HALF, Layer, Sums
from llmc.compiler.targets.gpu.tensor_cores import MATRIX_COLUMNS, MATRIX_ROWS, STEP_BYTES, WARPS
from llmc.compiler.targets.gpu.wgmma import X_STAGES, WgmmaForm
from llmc.compiler.targets.reference.kernels.frame import Array, Expr, let, when

_WORDS = 4  # of a lane's part of a step of a row
_TILE_WORDS = MATRIX_COLUMNS * STEP_BYTES // 4
_PRODUCTS = 2
"""Products of a step."""


class _X:
    """Steps of a tile's rows of x in shared memory, through registers.

    A tile of 8 rows is four matrices of 8 rows by 16 bytes, each contiguous. A lane loads four neighbouring words of a
    row, and one of them goes to each matrix: so two matrices are a product's part of K, as lanes have it of the weight.
    """

    def __init__(self, of: Layer, form: WgmmaForm, memory: Shared, begin: int) -> None:
        assert of.x.aligned  # a lane loads 16 bytes at a time
        self._of, self._form, self._memory, self._begin = of, form, memory, begin
        self._turns = -(-form.tiles // WARPS)
        self._next = Array(self._turns * _WORDS, "uint32")
        self._within = let(of.of_row * LANES + of.lane)

    def begin(self, tile: Tile) -> None:
        self._tiles = [let(self._of.warp + turn * WARPS) for turn in range(self._turns)]
        self._rows = [
            tile.row(let(T.min(number * MATRIX_COLUMNS + self._of.of_row, tile.count - 1))) for number in self._tiles
        ]

    def load(self, step: Expr) -> None:
        """Asks for a step."""
        of, at = self._of, self._of.lane * (STEP_BYTES // LANES)
        for turn, row in enumerate(self._rows):
            with self._some(turn):
                call("llmc_load16", self._next.address(turn * _WORDS), of.x.address(of.k, row, step, at))

    def store(self, step: Expr) -> None:
        """Stores the step that was asked for last."""
        stage = self._stage(step)
        for turn, number in enumerate(self._tiles):
            with self._some(turn):
                to = let(stage + number * _TILE_WORDS + self._within * _WORDS)
                call("llmc_store_matrices", self._memory.address(to), self._next.address(turn * _WORDS))

    def _some(self, turn: int) -> AbstractContextManager[None]:
        """The warps that have a tile in this turn."""
        all_have = (turn + 1) * WARPS <= self._form.tiles
        return nullcontext() if all_have else when(self._tiles[turn] < self._form.tiles)

    def _stage(self, step: Expr) -> Expr:
        return let(T.truncmod(step, X_STAGES) * (self._form.tiles * _TILE_WORDS) + self._begin)

    def addresses(self, step: Expr) -> list[Expr]:
        """Where the matrices of each product begin."""
        stage = self._stage(step)
        return [self._memory.address(let(stage + i * (_TILE_WORDS // _PRODUCTS))) for i in range(_PRODUCTS)]


class _WgmmaSums(Sums):
    """Sums of a warp's fragments by all rows of x of the group."""

    def __init__(self, of: Layer, form: WgmmaForm) -> None:
        super().__init__(of, form.fragments, form.tiles)
        self._words, self._count = Array(form.fragments * 2 * _WORDS, "uint32"), form.fragments * form.tiles * 4

    def unpack(self, step: Expr, weight: Staged, first: Expr) -> None:
        """Reads the fragments of a step. first: the lane's first row in the group."""
        of = self._of
        for fragment, rows in enumerate(self.rows):
            for half, row in enumerate(rows):
                stored = weight.read(step, let(first + (fragment * MATRIX_ROWS + half * HALF)))
                words = of.weight.words(stored, of.zero(row, step))
                for i in range(_WORDS):
                    self._words[self._at(fragment, half, i)] = words[i]

    def _at(self, fragment: int, half: int, word: int) -> int:
        return (fragment * 2 + half) * _WORDS + word

    def ask(self, x: list[Expr]) -> None:
        """Asks for the products of the fragments. x: addresses of their matrices."""
        call(f"llmc_products_begin<{self._count}>", self._chain.address(0))
        name = f"llmc_wgmma_{self._of.layer.dtype}<{self.tiles * MATRIX_COLUMNS}>"
        for fragment in range(self.fragments):
            c = self._chain.address(fragment * self.tiles * 4)
            for product, matrices in enumerate(x):
                a = [self._words[self._at(fragment, half, 2 * product + i)] for i in range(2) for half in range(2)]
                call(name, c, *a, matrices)
        call("llmc_products_end")

    def wait(self) -> None:
        """Waits for them. Until then nothing may change the sums, nor the registers of the fragments."""
        operands = self.fragments * 2 * _WORDS
        call(f"llmc_products_wait<{self._count}, {operands}>", self._chain.address(0), self._words.address(0))


def wgmma_rows(of: Layer, rows: Expr, form: WgmmaForm, memory: Shared) -> None:
    """One unit is a group's tile of weight rows by rows of x; each warp has fragments of its own, and all rows of x."""
    k, steps, stages, parts = of.k, of.layer.steps, form.stages(of.layer), of.parts
    row_tile = row_tiles(k, of.layer, rows, form)
    # x begins where the weight ends, at a multiple of 16 bytes, as matrices must.
    weight = Staged(of, of.weight.operand, form.weight_rows, stages, memory, 0)
    x = _X(of, form, memory, stages * form.weight_rows * of.layer.weight_step_bytes // 4)
    sums = _WgmmaSums(of, form)
    warp_rows, wide = form.fragments * MATRIX_ROWS, form.weight_rows // parts
    first = let(of.warp * warp_rows + of.of_row)
    count = row_tile.count
    # Neighbouring groups have the same weight rows.
    with calling(k).share_groups(let(count * -(-of.columns // wide))) as unit:
        number, column = let(T.truncmod(unit, count)), let(T.truncdiv(unit, count) * wide)
        tile: Tile = row_tile.at(number)

        def weight_row(place: Expr) -> Expr:
            """Warps take neighbouring rows; with a gate, 16 of each part in turn."""
            block, within = let(T.truncdiv(place, MATRIX_ROWS)), let(T.truncmod(place, MATRIX_ROWS))
            of_part = let(T.min(column + T.truncdiv(block, parts) * MATRIX_ROWS + within, of.columns - 1))
            return let(tile.base + of_part + T.truncmod(block, parts) * of.columns)

        def copy(step: Expr) -> None:
            with T.If(step < steps), T.Then():
                weight.copy(step)
            call("llmc_copies_end")

        weight.rows(weight_row)
        x.begin(tile)
        sums.begin(tile, let(column + of.warp * (warp_rows // parts)), T.int32(0))
        sync()
        for ahead in range(stages):
            copy(let(T.int32(ahead)))
        # No kernel writes what was asked for so far. Which rows those of an expert are, only the index tells.
        if not of.layer.experts:
            call(AWAIT)
        x.load(T.int32(0))
        x.store(T.int32(0))
        x.load(T.int32(min(1, steps - 1)))
        call(f"llmc_copies_wait<{stages - 1}>")
        call("llmc_shared_visible")
        sync()
        with T.serial(steps) as step:
            # Fragments of the next step have to wait for these: the assembler runs products one by one where it finds
            # that registers of their operands are written meanwhile, by way of copies, too.
            sums.unpack(step, weight, first)
            sums.ask(x.addresses(step))
            # Every warp waited for the products of the step before the last, and then came to the last barrier: their
            # stage of x is free. So is the stage of the weight that was just unpacked, behind this barrier.
            with when(step + 1 < steps):
                x.store(let(step + 1))
            call(f"llmc_copies_wait<{stages - 2}>")
            call("llmc_shared_visible")
            sync()
            copy(let(step + stages))
            x.load(let(T.min(step + 2, steps - 1)))
            sums.wait()
            sums.end_step(step)
        call("llmc_copies_wait<0>")
        sums.end()
        sums.write()
