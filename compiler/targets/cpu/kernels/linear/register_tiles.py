"""Tiles in tile registers: chunks of rows times blocks of K of a panel, 32 rows at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from tvm.script.ir_builder import tirx as T

from llmc.compiler.targets.cpu.kernels import builder as b
from llmc.compiler.targets.cpu.kernels.ir import tiles as ir
from llmc.compiler.targets.cpu.kernels.linear.micro.amx import ROWS, TileRegisters
from llmc.compiler.targets.cpu.kernels.linear.places import Fetch, Tile, Walk
from llmc.compiler.targets.cpu.kernels.linear.sums import Sums
from llmc.compiler.targets.cpu.kernels.linear.vector_tiles import VectorTiles

_MERGED_ROWS = 4  # rows whose sums of a group and of all groups fit the vector registers


class RegisterTiles:
    """Emits the tiles, and with `vectors` the code around them.

    whole_chunk: `sums` has room for all row tiles of a chunk, not only for the ROWS computed at a time.
    """

    def __init__(
        self, registers: TileRegisters, vectors: VectorTiles, walk: Walk, sums: Sums, *, whole_chunk: bool
    ) -> None:
        self.p, self.registers, self.vectors, self.walk = vectors.p, registers, vectors, walk
        self.reader, self.epilogue, self.sums, self.whole_chunk = vectors.reader, vectors.epilogue, sums, whole_chunk
        self.turn_tiles = ROWS // self.p.tile
        self.block_steps = walk.lines // self.p.step_lines
        # Words past a panel's last whole step may lie outside the weight.
        padded = not walk.unpacked and registers.tail
        self.ends = b.Scratch(ir.LINES * self.p.columns, "int32") if padded else None
        if self.ends is not None and not self.p.integer:
            # The following bytes of the weight may be NaN, which a zero activation does not cancel.
            with T.serial(ir.LINES * self.p.vectors) as i:
                self.ends.store(T.broadcast(T.int32(0), b.WIDTH), i * b.WIDTH)
        self.group_sums = Sums(1, self.turn_tiles, self.p.tile, self.p.columns) if self.p.groups > 1 else sums

    def block(
        self, tile0: b.Expr, tiles: b.Expr, unit: b.Expr, part: b.Expr, kb: b.Expr,
        fetch_of: Callable[[b.Expr], Fetch],
    ) -> None:  # fmt: skip
        """The chunk of row tiles [tile0, tile0 + tiles) times block kb of panel `unit` of a part of the weight.
        fetch_of: makes the prefetches for a number of turns."""
        p = self.p
        turns = T.truncdiv(tiles + (self.turn_tiles - 1), self.turn_tiles)
        fetch = fetch_of(b.let(turns)) if p.quantized else None
        panel = b.let(p.panel(part, unit))
        if self.ends is not None:
            with b.when(kb == self.walk.count - 1):
                self._copy_ends(self.ends, panel)
        if fetch is None:
            turns = b.let(turns)
            fetch = fetch_of(turns)
        with T.serial(turns) as i:
            turn = p.let(i)
            first = b.let(turn * self.turn_tiles)
            here = b.let(T.min(tiles - first, self.turn_tiles))
            t, share = p.let(tile0 + first), fetch.of_tile(turn) if fetch.of_tile else fetch
            columns, x0 = [unit * p.columns], T.int32(0)
            one, two = (
                Tile(t, turn, range(rows), [unit], part, [panel], [part], columns, x0, self.walk, kb, share)
                for rows in (ir.LINES, ROWS)
            )
            if self.registers.chunk_tiles == self.registers.of_register:
                self._rows_of(one, first, here, 1)
            else:
                with T.If(here > self.registers.of_register):
                    with T.Then():
                        self._rows_of(two, first, here, 2)
                    with T.Else():
                        self._rows_of(one, first, here, 1)

    def _copy_ends(self, ends: b.Scratch, panel: b.Expr) -> None:
        """Copies the words of a panel past its last whole step; activations for the missing words are zeros."""
        start = self.p.let(self.reader.position(panel, T.int32(self.registers.whole_steps * self.p.step_lines)))
        with T.serial(self.registers.tail * self.p.vectors) as i:
            ends.store(self.reader.w[T.ramp(start + i * b.WIDTH, 1, b.WIDTH)], i * b.WIDTH)

    def _rows_of(self, tile: Tile, first: b.Expr, tiles: b.Expr, registers: int) -> None:
        """`tiles` row tiles from row tile `first` of the chunk on, which fill one or two registers."""
        p, walk, kb = self.p, self.walk, tile.kb
        home = b.let(first if self.whole_chunk else T.int32(0))
        # The place of the start of sums and of the test for a panel's end was chosen by measuring the machine code of
        # each kind.
        if not p.quantized:
            self.registers.begin(registers, kb, walk.count, self.sums, tile.part, home)
        step0 = b.let(kb * self.block_steps)
        step1 = b.let(T.min(step0 + self.block_steps, self.registers.steps))
        if p.groups == 1:
            if p.quantized:
                self.registers.begin(registers, kb, walk.count, self.sums, tile.part, home)
            at_end = step1 == self.registers.steps if p.quantized else kb == walk.count - 1
            self._multiply(tile, first, registers, step0, step1, step0, at_end)
            self.registers.store(registers, self.sums, tile.part, home)
        else:
            with b.when(kb == 0), T.serial(tiles * p.tile) as r:
                for v in range(p.vectors):
                    self.sums.store(b.splat(0.0), tile.part, home, r, v)
            of_group = p.group_lines // p.step_lines
            with T.serial(T.truncdiv(step0, of_group), T.truncdiv(step1 + (of_group - 1), of_group)) as g:
                group = b.let(g)
                start = b.let(group * of_group)
                self.registers.zero(registers)
                end = b.let(T.min(start + of_group, step1))
                self._multiply(tile, first, registers, start, end, step0, end == self.registers.steps)
                self.registers.store(registers, self.group_sums, T.int32(0), T.int32(0))
                self._merge(tile, tiles, home, group)
        if not self.epilogue.nothing:
            with b.when(kb == walk.count - 1):
                self._finish(tile, tiles, home)

    def _multiply(
        self, tile: Tile, first: b.Expr, registers: int, first_step: b.Expr, last_step: b.Expr, step0: b.Expr,
        at_end: b.Expr,
    ) -> None:  # fmt: skip
        """Adds steps [first_step, last_step) of K. first: row tile of the chunk. step0: first step of the block.
        at_end: whether they include the panel's last step."""
        panel, columns, ends = tile.panels[0], self.p.columns, self.ends
        whole = last_step if ends is None else b.let(T.min(last_step, self.registers.whole_steps))
        with T.serial(first_step, whole) as s:
            at = b.let(s)
            if tile.fetch.at_turn is not None:
                tile.fetch.at_turn(tile, b.let(at - step0))
            if self.walk.unpacked:
                start = b.let((at - step0) * (ir.WORDS * columns))
                self.registers.step(registers, first, at, lambda v: self.vectors.wide.at(start + v * b.WIDTH))
            else:
                start = b.let(self.reader.position(panel, at * self.p.step_lines))
                self.registers.step(registers, first, at, lambda v: b.at(self.reader.w, start + v * b.WIDTH))
        if ends is not None:
            with b.when(at_end):
                tail = T.int32(self.registers.whole_steps)
                self.registers.step(registers, first, tail, lambda v: ends.at(v * b.WIDTH))

    def _row_tile(self, tile: Tile, i: b.Expr, home: b.Expr, rows: range) -> Tile:
        """Row tile i of those computed; its sums of all groups are at `home`. rows: some of its rows."""
        t = b.let(tile.t + i)
        return replace(tile, t=t, x0=t * self.p.tile_words, t_local=b.let(home + i), rows=rows)

    def _sums_of(
        self, tile: Tile, place: b.Expr, t: b.Expr, rows: list[b.Expr], group: b.Expr
    ) -> b.Vectors | list[b.Expr]:
        """Stored sums of a group for some rows of a row tile, plus their initial value. t: where they are stored."""
        stored = [self.group_sums.load(place, t, r, v) for r in rows for v in range(self.p.vectors)]
        if not self.p.integer:
            return stored
        acc = b.Vectors(len(stored), self.vectors.micro.sums)
        self.vectors.start(tile, acc, group, rows)
        for at, value in enumerate(stored):
            acc[at] = acc[at] + T.reinterpret("int32x16", value)
        return acc

    def _merge(self, tile: Tile, tiles: b.Expr, home: b.Expr, group: b.Expr) -> None:
        """Adds the sums of a group to those of all groups."""
        with T.serial(tiles) as i:
            for start in range(0, self.p.tile, _MERGED_ROWS):
                rows = range(start, start + _MERGED_ROWS)
                one = self._row_tile(tile, i, home, rows)
                acc = self._sums_of(one, T.int32(0), i, list(rows), group)
                total = b.Vectors(len(rows) * self.p.vectors)
                self.vectors.reload(one, total)
                self.vectors.merge(one, total, acc, group)
                self.vectors.hold(one, total)

    def _finish(self, tile: Tile, tiles: b.Expr, home: b.Expr) -> None:
        """Writes finished rows, to y or for the activation."""
        p = self.p
        with T.serial(tiles) as i:
            one = self._row_tile(tile, i, home, range(1))
            with T.serial(b.let(T.min(self.vectors.num_rows - one.t * p.tile, p.tile))) as row:
                r = b.let(row)
                if p.groups == 1:
                    total = self._sums_of(one, one.part, one.t_local, [r], T.int32(0))
                else:
                    total = b.Vectors(p.vectors)
                    for v in range(p.vectors):
                        total[v] = self.sums.load(one.part, one.t_local, r, v)
                self.epilogue.row(one, 0, r, total, let=p.name)
