"""`linear` of bf16 in AMX tile registers, whatever the number of rows: the arithmetic is the instruction's own.

A step is 32 elements of K: TDPBF16PS sums products of even and of odd elements in two chains of fma from 0, ascending,
adds these, and adds that to the sum so far; denormals are 0. K starts at 0 for every row and ascends.
"""

from __future__ import annotations

from collections.abc import Callable

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from llmc.compiler.kernel_spec import KernelSpec
from llmc.compiler.targets.cpu.kernels import builder as b
from llmc.compiler.targets.cpu.kernels import tile_ir, vector_ir
from llmc.compiler.targets.cpu.kernels.chunks import Chunks
from llmc.compiler.targets.cpu.kernels.linear_layer import LinearLayer
from llmc.compiler.targets.cpu.kernels.sums import Sums
from llmc.compiler.targets.cpu.kernels.tile_registers import ROWS, TileRegisters
from llmc.compiler.targets.cpu.target import Target

_KIND = "bf16"
_ROW_CHUNK, _ROW_CHUNK_BYTES = 512, 512 << 10  # of activations, copied to the stack, that stay in L2 while panels pass
_BLOCK_STEPS = 8  # steps of K in one pass: with 48 columns 24 KiB of weights, half of L1


def takes(spec: KernelSpec, target: Target) -> bool:
    """Whether a linear layer goes through tile registers."""
    return target.bf16_tiles and spec.as_dict()["act_dtype"] == "bf16"


class TileLinear(LinearLayer):
    """One kernel."""

    def __init__(self, spec: KernelSpec, target: Target) -> None:
        super().__init__(spec, target)
        rows = min(_ROW_CHUNK, _ROW_CHUNK_BYTES // (self.words * 4)) // ROWS * ROWS
        # Graphs of a smaller row tile have no more rows than that.
        rows = rows if self.tile == target.row_tile else 0
        self.chunk_tiles = max(tile_ir.LINES, rows) // self.tile
        self.turn_tiles = ROWS // self.tile
        self.steps = b.ceil_div(self.words, tile_ir.WORDS)
        self.blocks = b.ceil_div(self.steps, _BLOCK_STEPS)

    def function(self) -> tirx.PrimFunc:
        puts = self.gate.puts() if self.gate else ()
        helpers = vector_ir.helpers(self.target.mcpu, puts=puts)
        helpers += TileRegisters.helpers(_KIND, self.tile, self.words, self.columns)
        kernel = b.Kernel(self.spec.symbol(), self.buffer_dtypes(), helpers)
        with kernel as k:
            self.k, self.w, self.y = k, k["w"], k["y"]
            self.num_rows = k.scalar(self.rows)
            tile_words = self.words * self.tile
            self.registers = TileRegisters(
                _KIND, k["x"], self.tile, self.words, tile_words, self.columns, self.chunk_tiles
            )
            self.whole_chunk = self.gate is not None or self.blocks > 1
            self.sums = Sums(
                self.parts, self.chunk_tiles if self.whole_chunk else self.turn_tiles, self.tile, self.columns
            )
            self.ends = self.zeroed_ends() if self.registers.tail else None
            self.chunks()
        return kernel.function()

    def zeroed_ends(self) -> b.Scratch:
        """Place for what lies past a panel's last whole step. What follows in the weight may be no number."""
        ends = b.Scratch(tile_ir.LINES * self.columns, "int32")
        with T.serial(tile_ir.LINES * self.vectors) as i:
            ends.store(T.broadcast(T.int32(0), b.WIDTH), i * b.WIDTH)
        return ends

    # ---- loops ------------------------------------------------------------------------------------------------------

    def chunks(self) -> None:
        """Chunks of row tiles × panels × blocks of K × rows of two registers: a block stays in cache for all rows, who
        fetch the next one meanwhile, each its share."""
        tiles = b.let(T.truncdiv(self.num_rows + (self.tile - 1), self.tile))
        chunks = Chunks(self.k, tiles, self.panels, self.chunk_tiles, min(self.turn_tiles, self.chunk_tiles))
        unit0, unit1 = chunks.bounds()
        last = b.let(unit1 * (self.parts * self.blocks) - 1)
        b.do("tile_configure")
        with T.serial(unit0, unit1) as unit:
            chunk, panel = b.let(T.truncdiv(unit, self.panels)), b.let(T.truncmod(unit, self.panels))
            tile0, here = chunks.span(chunk)
            with b.when(T.Or(unit == unit0, panel == 0)):
                self.registers.copy_rows(tile0, here)
            with T.serial(self.parts) as p, T.serial(self.blocks) as block:
                part, kb = b.let(p), b.let(block)
                following = b.let(T.min((unit * self.parts + part) * self.blocks + kb + 1, last))
                self.block(tile0, here, panel, part, kb, self.block_start(following))
            if self.gate:
                with T.serial(here) as t:
                    self.gate.write(self.y, self.sums, (0, 1), panel, b.let(tile0 + t), b.let(t), self.num_rows)
        b.do("tile_release")

    def weight_panel(self, part: b.Expr, panel: b.Expr) -> b.Expr:
        """Which panel of the weight it is."""
        return panel if self.parts == 1 else part * self.panels + panel

    def block_start(self, number: b.Expr) -> b.Expr:
        """Where a block starts in the weight. number: of blocks before it, in the order in which they are walked."""
        unit_part = b.let(T.truncdiv(number, self.blocks))
        kb = b.let(number - unit_part * self.blocks)
        unit = b.let(T.truncdiv(unit_part, self.parts))
        panel = self.weight_panel(unit_part - unit * self.parts, T.truncmod(unit, self.panels))
        return b.let((panel * self.words + kb * (_BLOCK_STEPS * tile_ir.WORDS)) * self.columns)

    def block(self, tile0: b.Expr, tiles: b.Expr, unit: b.Expr, part: b.Expr, kb: b.Expr, following: b.Expr) -> None:
        """The chunk of row tiles [tile0, tile0 + tiles) times block kb of panel `unit` of a part of the weight.

        following: where the block starts that is read next.
        """
        panel = b.let(self.weight_panel(part, unit))
        ends = self.ends
        if ends is not None:
            with b.when(kb == self.blocks - 1), T.serial(self.registers.tail * self.vectors) as i:
                at = (panel * self.words + self.registers.whole_steps * tile_ir.WORDS) * self.columns + i * b.WIDTH
                ends.store(self.w[T.ramp(at, 1, b.WIDTH)], i * b.WIDTH)
        turns = b.let(T.truncdiv(tiles + (self.turn_tiles - 1), self.turn_tiles))
        # Each turn's share of the lines of every place of the next block, and each step's of that.
        lines = _BLOCK_STEPS * tile_ir.WORDS
        share = b.let(T.truncdiv(lines + (turns - 1), turns))
        of_step = b.let(T.truncdiv(share + (_BLOCK_STEPS - 1), _BLOCK_STEPS))
        with T.serial(turns) as turn:
            first = b.let(turn * self.turn_tiles)
            here = b.let(T.min(tiles - first, self.turn_tiles))
            ahead = b.let(following + turn * share * b.WIDTH)

            def fetch(step: b.Expr, ahead: b.Expr = ahead) -> None:
                with T.serial(of_step) as i:
                    at = b.let(ahead + (step * of_step + i) * b.WIDTH)
                    for place in range(self.vectors):
                        b.do("prefetch_l2", b.at(self.w, at + place * (lines * b.WIDTH)))

            if self.chunk_tiles == self.registers.of_register:
                self.rows_of(1, tile0, first, here, unit, part, panel, kb, fetch)
            else:
                with T.If(here > self.registers.of_register):
                    with T.Then():
                        self.rows_of(2, tile0, first, here, unit, part, panel, kb, fetch)
                    with T.Else():
                        self.rows_of(1, tile0, first, here, unit, part, panel, kb, fetch)

    def rows_of(
        self, registers: int, tile0: b.Expr, first: b.Expr, tiles: b.Expr, unit: b.Expr, part: b.Expr, panel: b.Expr,
        kb: b.Expr, fetch: Callable[[b.Expr], None],
    ) -> None:  # fmt: skip
        """`tiles` row tiles from row tile `first` of the chunk on, which fill one or two registers."""
        home = b.let(first if self.whole_chunk else T.int32(0))
        self.registers.begin(registers, kb, self.blocks, self.sums, part, home)
        step0 = b.let(kb * _BLOCK_STEPS)
        with T.serial(step0, b.let(T.min(step0 + _BLOCK_STEPS, self.registers.whole_steps))) as s:
            step = b.let(s)
            fetch(b.let(step - step0))
            start = b.let((panel * self.words + step * tile_ir.WORDS) * self.columns)
            self.registers.step(registers, first, step, lambda v: b.at(self.w, start + v * b.WIDTH))
        ends = self.ends
        if ends is not None:
            with b.when(kb == self.blocks - 1):
                tail = T.int32(self.registers.whole_steps)
                self.registers.step(registers, first, tail, lambda v: ends.at(v * b.WIDTH))
        self.registers.store(registers, self.sums, part, home)
        if self.bias or not self.gate:
            with b.when(kb == self.blocks - 1):
                self.finish(tile0, first, tiles, unit, part, home)

    def finish(self, tile0: b.Expr, first: b.Expr, tiles: b.Expr, unit: b.Expr, part: b.Expr, home: b.Expr) -> None:
        """Adds bias and residual to finished sums and writes them, to y or for the gate."""
        with T.serial(tiles) as i:
            t, t_home = b.let(tile0 + first + i), b.let(home + i)
            with T.serial(b.let(T.min(self.num_rows - t * self.tile, self.tile))) as row:
                r = b.let(row)
                for v in range(self.vectors):
                    column = b.let(unit * self.columns + v * b.WIDTH)
                    count = b.WIDTH if self.width % self.columns == 0 else self.width - column
                    value = self.sums.load(part, t_home, r, v)
                    if self.bias:
                        value = b.call("add", value, b.load_vector(self.k["bias"], part * self.width + column, count))
                    if self.gate:
                        self.sums.store(value, part, t_home, r, v)
                        continue
                    at = b.let((t * self.tile + r) * self.n + column)
                    if self.residual:
                        value = b.call("add", value, b.load_vector(self.k["residual"], at, count))
                    b.store_vector(self.y, value, at, count)
