"""Many rows of `linear_quant` with int8 activations in AMX tile registers.

Sums are exact integers, so results have the bits of every other way. Those of a group are stored and merged as floats.
"""

from __future__ import annotations

from tvm.script.ir_builder import tirx as T

from llmc.compiler.targets.cpu.kernels import builder as b
from llmc.compiler.targets.cpu.kernels import tile_ir
from llmc.compiler.targets.cpu.kernels.quant_layer import STEP_LINES, QuantLayer
from llmc.compiler.targets.cpu.kernels.quant_place import Fetch, Tile, Walk
from llmc.compiler.targets.cpu.kernels.quant_tile import TileWriter
from llmc.compiler.targets.cpu.kernels.quant_weight import QuantWeight
from llmc.compiler.targets.cpu.kernels.sums import Sums
from llmc.compiler.targets.cpu.kernels.tile_registers import ROWS, TileRegisters
from llmc.compiler.targets.cpu.target import Target

_KIND = "s8u8"
_MERGED_ROWS = 4  # whose sums of a group and of all groups fit the vector registers


def takes(layer: QuantLayer, target: Target) -> bool:
    """Whether many rows of a layer go through tile registers: its groups, if several, are whole steps."""
    steps = layer.groups == 1 or layer.group_lines % STEP_LINES == 0
    return target.int8_tiles and layer.integer and layer.tile == target.row_tile and steps


def helpers(layer: QuantLayer) -> str:
    """The IR text that a kernel with `Blocks` needs."""
    return TileRegisters.helpers(_KIND, layer.tile, layer.x_words, layer.columns)


class Blocks:
    """Emits chunks of rows times blocks of K of a panel.

    chunk_tiles: row tiles of a chunk at most; whole_chunk: `sums` have place for all of them, not only for the ROWS
    that are computed at a time.
    """

    def __init__(
        self, layer: QuantLayer, weight: QuantWeight, writer: TileWriter, sums: Sums, walk: Walk, chunk_tiles: int,
        *, whole_chunk: bool,
    ) -> None:  # fmt: skip
        self.layer, self.weight, self.writer, self.sums, self.walk = layer, weight, writer, sums, walk
        self.whole_chunk = whole_chunk
        self.registers = TileRegisters(
            _KIND, writer.x, layer.tile, layer.x_words, layer.tile_words, layer.columns, chunk_tiles
        )
        self.turn_tiles = ROWS // layer.tile
        self.block_steps = walk.lines // STEP_LINES
        # What lies past a panel's last whole step may lie past the weight.
        padded = not walk.unpacked and self.registers.tail
        self.ends = b.Scratch(tile_ir.LINES * layer.columns, "int32") if padded else None
        self.group_sums = Sums(1, self.turn_tiles, layer.tile, layer.columns) if layer.groups > 1 else sums

    def turns(self, tiles: b.Expr) -> b.Expr:
        """How many times rows are computed of so many row tiles."""
        return T.truncdiv(tiles + (self.turn_tiles - 1), self.turn_tiles)

    def block(self, tile0: b.Expr, tiles: b.Expr, unit: b.Expr, part: b.Expr, kb: b.Expr, fetch: Fetch) -> None:
        """The chunk of row tiles [tile0, tile0 + tiles) times block kb of panel `unit` of a part of the weight."""
        panel = b.let(self.layer.panel(part, unit))
        if self.ends is not None:
            with b.when(kb == self.walk.count - 1):
                self.copy_ends(self.ends, panel)
        with T.serial(self.turns(tiles)) as i:
            turn = b.let(i)
            first = b.let(turn * self.turn_tiles)
            here = b.let(T.min(tiles - first, self.turn_tiles))
            t = b.let(tile0 + first)
            one, two = (
                Tile(t, turn, range(rows), [unit], part, [panel], [part], T.int32(0), self.walk, kb, fetch)
                for rows in (tile_ir.LINES, ROWS)
            )
            with T.If(here > self.registers.of_register):
                with T.Then():
                    self.tile_body(two, first, here, 2)
                with T.Else():
                    self.tile_body(one, first, here, 1)

    def copy_ends(self, ends: b.Scratch, panel: b.Expr) -> None:
        """The words of a panel past its last whole step; activations of other words are zeros."""
        start = b.let(self.weight.position(panel, T.int32(self.registers.whole_steps * STEP_LINES)))
        with T.serial(self.registers.tail * self.layer.vectors) as i:
            ends.store(self.weight.w[T.ramp(start + i * b.WIDTH, 1, b.WIDTH)], i * b.WIDTH)

    def tile_body(self, tile: Tile, first: b.Expr, tiles: b.Expr, registers: int) -> None:
        """`tiles` row tiles from row tile `first` of the chunk on, which fill one or two registers."""
        layer, walk, kb = self.layer, self.walk, tile.kb
        home = b.let(first if self.whole_chunk else T.int32(0))
        step0 = b.let(kb * self.block_steps)
        step1 = b.let(T.min(step0 + self.block_steps, self.registers.steps))
        if layer.groups == 1:
            self.registers.begin(registers, kb, walk.count, self.sums, tile.part, home)
            self.multiply(tile, first, registers, step0, step1, step0)
            self.registers.store(registers, self.sums, tile.part, home)
        else:
            with b.when(kb == 0), T.serial(tiles * layer.tile) as r:
                for v in range(layer.vectors):
                    self.sums.store(b.splat(0.0), tile.part, home, r, v)
            of_group = layer.group_lines // STEP_LINES
            with T.serial(T.truncdiv(step0, of_group), T.truncdiv(step1 + (of_group - 1), of_group)) as g:
                group = b.let(g)
                start = b.let(group * of_group)
                self.registers.zero(registers)
                self.multiply(tile, first, registers, start, b.let(T.min(start + of_group, step1)), step0)
                self.registers.store(registers, self.group_sums, T.int32(0), T.int32(0))
                self.merge(tile, tiles, home, group)
        with b.when(kb == walk.count - 1):
            self.finish(tile, tiles, home)

    def multiply(
        self, tile: Tile, first: b.Expr, registers: int, first_step: b.Expr, last_step: b.Expr, step0: b.Expr
    ) -> None:
        """Adds steps [first_step, last_step) of K. first: row tile of the chunk; step0: first one of the block."""
        panel, columns, ends = tile.panels[0], self.layer.columns, self.ends
        whole = last_step if ends is None else b.let(T.min(last_step, self.registers.whole_steps))
        with T.serial(first_step, whole) as s:
            at = b.let(s)
            if tile.fetch.at_turn is not None:
                tile.fetch.at_turn(tile, b.let(at - step0))
            if self.walk.unpacked:
                start = b.let((at - step0) * (tile_ir.WORDS * columns))
                self.registers.step(registers, first, at, lambda v: self.writer.wide.at(start + v * b.WIDTH))
            else:
                start = b.let(self.weight.position(panel, at * STEP_LINES))
                self.registers.step(registers, first, at, lambda v: b.at(self.weight.w, start + v * b.WIDTH))
        if ends is not None:
            with b.when(last_step == self.registers.steps):
                tail = T.int32(self.registers.whole_steps)
                self.registers.step(registers, first, tail, lambda v: ends.at(v * b.WIDTH))

    def row_tile(self, tile: Tile, i: b.Expr, home: b.Expr, rows: range) -> Tile:
        """Row tile i of those computed, whose sums of all groups are at `home`; rows: some of its."""
        t = b.let(tile.t + i)
        x0, t_home = b.let(t * self.layer.tile_words), b.let(home + i)
        return Tile(
            t, t_home, rows, tile.units, tile.part, tile.panels, tile.places, x0, tile.walk, tile.kb, tile.fetch
        )

    def exact(self, tile: Tile, place: b.Expr, t: b.Expr, rows: list[b.Expr], group: b.Expr) -> b.Vectors:
        """The sums of some rows of a row tile as they were stored, begun as `TileWriter.start` does. t: where."""
        vectors = self.layer.vectors
        acc = b.Vectors(len(rows) * vectors, "int32")
        self.writer.start(tile, acc, group, rows)
        for i, r in enumerate(rows):
            for v in range(vectors):
                stored = T.reinterpret("int32x16", self.group_sums.load(place, t, r, v))
                acc[i * vectors + v] = acc[i * vectors + v] + stored
        return acc

    def merge(self, tile: Tile, tiles: b.Expr, home: b.Expr, group: b.Expr) -> None:
        """Adds the sums of a group to those of all groups."""
        vectors = self.layer.vectors
        with T.serial(tiles) as i:
            for start in range(0, self.layer.tile, _MERGED_ROWS):
                rows = range(start, start + _MERGED_ROWS)
                one = self.row_tile(tile, i, home, rows)
                acc = self.exact(one, T.int32(0), i, list(rows), group)
                total = b.Vectors(len(rows) * vectors)
                places = [(j * vectors + v, r, v) for j, r in enumerate(rows) for v in range(vectors)]
                for at, r, v in places:
                    total[at] = self.sums.load(one.part, one.t_local, r, v)
                self.writer.merge(one, total, acc, group)
                for at, r, v in places:
                    self.sums.store(total[at], one.part, one.t_local, r, v)

    def finish(self, tile: Tile, tiles: b.Expr, home: b.Expr) -> None:
        """Writes finished rows, to y or for the gate."""
        layer = self.layer
        with T.serial(tiles) as i:
            one = self.row_tile(tile, i, home, range(1))
            with T.serial(b.let(T.min(self.writer.num_rows - one.t * layer.tile, layer.tile))) as row:
                r = b.let(row)
                if layer.groups == 1:
                    total = self.exact(one, one.part, one.t_local, [r], T.int32(0))
                else:
                    total = b.Vectors(layer.vectors)
                    for v in range(layer.vectors):
                        total[v] = self.sums.load(one.part, one.t_local, r, v)
                self.writer.finish_row(one, 0, r, total)
