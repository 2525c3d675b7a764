"""Loops for many rows: chunks of row tiles × panels × blocks of K × row tiles. A block stays in cache for all tiles of
a chunk, and each tile prefetches its share of the next block.

`by_panels`: one panel at a time, in vectors or in tile registers. `by_groups`: one block of K for several panels in
turn. It is used if a block of the rows stays in cache for all these panels, or is converted to float32 once for all.
"""

from __future__ import annotations

from tvm.script.ir_builder import tirx as T

from llmc.compiler.targets.cpu.kernels import builder as b
from llmc.compiler.targets.cpu.kernels.linear.chunks import Chunks
from llmc.compiler.targets.cpu.kernels.linear.fetch import Fetches
from llmc.compiler.targets.cpu.kernels.linear.micro.base import BlockMicroKernel
from llmc.compiler.targets.cpu.kernels.linear.places import Fetch, Walk
from llmc.compiler.targets.cpu.kernels.linear.plan import FEW_TILES, Plan
from llmc.compiler.targets.cpu.kernels.linear.problem import TURN
from llmc.compiler.targets.cpu.kernels.linear.register_tiles import RegisterTiles
from llmc.compiler.targets.cpu.kernels.linear.sums import Sums
from llmc.compiler.targets.cpu.kernels.linear.vector_tiles import VectorTiles


class PanelByPanel:
    """Emits the loops of a kernel. registers: tile registers that compute the rows; None: vectors."""

    def __init__(self, tiles: VectorTiles, plan: Plan, fetches: Fetches, registers: RegisterTiles | None) -> None:
        self.p, self.tiles, self.plan, self.fetches, self.registers = tiles.p, tiles, plan, fetches, registers

    def run(self, row_tiles: b.Expr, walk: Walk) -> None:
        p, registers = self.p, self.registers
        chunks = Chunks(self.tiles.k, row_tiles, p.panels, self.plan.chunk_tiles, self.plan.chunk_unit)
        unit0, unit1 = chunks.bounds()
        last = b.let(unit1 * (p.parts * walk.count) - 1)
        if registers:
            b.do("tile_configure")
        with T.serial(unit0, unit1) as unit:
            chunk, panel = b.let(T.truncdiv(unit, p.panels)), b.let(T.truncmod(unit, p.panels))
            tile0, here = chunks.span(chunk)
            if registers or self.plan.copied_tiles:
                prepare = registers.registers.copy_rows if registers else self.tiles.micro.prepare
                with b.when(T.Or(unit == unit0, panel == 0)):
                    prepare(tile0, here)
            with T.serial(p.parts) as i, T.serial(walk.count) as block:
                part, kb = (i, block) if p.quantized else (b.let(i), b.let(block))
                if walk.unpacked:
                    line0 = b.let(kb * walk.lines)
                    length = b.let(T.min(p.lines - line0, walk.lines))
                    self.tiles.reader.unpack(self.tiles.wide, b.let(p.panel(part, panel)), line0, length)
                following = b.let(T.min((unit * p.parts + part) * walk.count + kb + 1, last))
                self._block(tile0, here, panel, part, kb, walk, self._start(following, walk))
            if p.activated:
                with T.serial(here) as t:
                    self.tiles.write_activated(panel, range(p.parts), b.let(tile0 + t), b.let(t))
        if registers:
            b.do("tile_release")

    def _block(
        self, tile0: b.Expr, here: b.Expr, panel: b.Expr, part: b.Expr, kb: b.Expr, walk: Walk, following: b.Expr
    ) -> None:
        """Row tiles [tile0, + here) times block kb of a panel. following: start of the next block."""
        if self.registers:

            def fetch_of(turns: b.Expr) -> Fetch:
                return self.fetches.share(following, walk, turns, self.p.step_lines)

            self.registers.block(tile0, here, panel, part, kb, fetch_of)
            return
        fetch = self.fetches.share(following, walk, here, self.p.group_lines if self.p.grouped else TURN)
        with T.serial(here) as t:
            fewer = self.plan.fewer_rows
            self.tiles.row_tile(tile0 + t, t, [panel], part, [part], walk, kb, fetch, fewer_rows=fewer)

    def _start(self, number: b.Expr, walk: Walk) -> b.Expr:
        """Start of a block in the weight. number: blocks before it, in the order of the walk."""
        p = self.p
        unit_part = b.let(T.truncdiv(number, walk.count))
        kb = b.let(number - unit_part * walk.count)
        unit = b.let(T.truncdiv(unit_part, p.parts))
        panel = p.let(p.panel(unit_part - unit * p.parts, T.truncmod(unit, p.panels)))
        return b.let(self.tiles.reader.position(panel, kb * walk.lines))


class GroupsOfPanels:
    """Emits the loops of a kernel. wide: buffer of an unpacked block."""

    def __init__(self, k: b.Kernel, num_rows: b.Expr, plan: Plan, fetches: Fetches, wide: b.Scratch | None) -> None:
        self.p, self.plan, self.walk, self.fetches = plan.reader.p, plan, plan.many, fetches
        p = self.p
        self.blocks: BlockMicroKernel | None = None
        if plan.widens:
            assert isinstance(plan.micro, BlockMicroKernel)
            self.blocks = plan.micro.in_blocks(k, plan.chunk_tiles, self.walk)
        if wide is None and plan.many.unpacked:
            wide = b.Scratch(plan.many.lines * p.columns * plan.reader.units, plan.reader.dtype)
        sums = Sums(plan.group * p.parts, plan.chunk_tiles, p.tile, p.columns)
        self.tiles = VectorTiles(p, k, num_rows, plan.reader, self.blocks or plan.micro, sums, wide)

    def run(self, row_tiles: b.Expr) -> None:
        """Chunks of row tiles × groups of panels × blocks of K × panels × row tiles."""
        p, most, let = self.p, self.plan.group, self.p.let
        chunks = Chunks(self.tiles.k, row_tiles, p.panels, self.plan.chunk_tiles)
        unit0, unit1 = chunks.bounds()
        chunk0, chunk1 = b.let(T.truncdiv(unit0, p.panels)), b.let(T.truncdiv(unit1 + (p.panels - 1), p.panels))
        with T.serial(chunk0, chunk1) as chunk:
            panel0 = b.let(T.max(unit0 - chunk * p.panels, 0))
            panel1 = b.let(T.min(unit1 - chunk * p.panels, p.panels))
            tile0, here = chunks.span(let(chunk))
            with T.serial(T.truncdiv(panel1 - panel0 + (most - 1), most)) as group:
                first = b.let(panel0 + group * most)
                count = b.let(T.min(most, panel1 - first))
                next_group = self._panel_behind(first + count, chunk + 1 < chunk1)
                with T.serial(self.walk.count) as block:
                    kb = let(block)
                    line0 = let(kb * self.walk.lines)
                    length = b.let(T.min(p.lines - line0, self.walk.lines))
                    if self.blocks is not None:
                        with T.serial(here) as t:
                            self.blocks.prepare_block(let(tile0 + t), let(t), kb, length)
                    if p.quantized:
                        self._panels_of_parts(tile0, here, first, count, kb, line0, length)
                    else:
                        with T.serial(count * p.parts) as turn:
                            self._float_panel(tile0, here, first, count, turn, kb, line0, length, next_group)
                if p.activated:
                    with T.serial(count) as i, T.serial(here) as t:
                        places = [part * most + i for part in range(p.parts)]
                        self.tiles.write_activated(first + i, places, tile0 + t, t)

    def _panels_of_parts(
        self, tile0: b.Expr, here: b.Expr, first: b.Expr, count: b.Expr, kb: b.Expr, line0: b.Expr, length: b.Expr
    ) -> None:
        """Row tiles [tile0, + here) times block kb of panels [first, + count) of all parts."""
        p, walk, reader = self.p, self.walk, self.plan.reader
        with T.serial(p.parts) as part, T.serial(count) as i:
            panel = b.let(p.panel(part, first + i))
            reader.unpack(self.tiles.wide, panel, line0, length)
            # the group's last panel of the part: K continues at its first panel
            past = b.let(T.Cast("int32", i + 1 == count))
            following = b.let(T.min(kb + past, walk.count - 1))
            ahead = reader.position(p.panel(part, first + (i + 1) * (1 - past)), following * walk.lines)
            turn_lines = p.group_lines if p.grouped else TURN
            fetch, place = self.fetches.share(b.let(ahead), walk, here, turn_lines), b.let(part * self.plan.group + i)
            with T.serial(here) as t:
                fewer = self.plan.fewer_rows
                self.tiles.row_tile(tile0 + t, t, [first + i], part, [place], walk, kb, fetch, fewer_rows=fewer)

    def _float_panel(
        self, tile0: b.Expr, here: b.Expr, first: b.Expr, count: b.Expr, turn: b.Expr, kb: b.Expr, line0: b.Expr,
        length: b.Expr, next_group: b.Expr,
    ) -> None:  # fmt: skip
        """The same for one panel of the group, given by its turn: the panels of the first part come first. next_group:
        the panel that is read after the group."""
        p, reader = self.p, self.plan.reader
        unit, part, place = self._turned(first, count, turn)
        last = T.Cast("int32", turn + 1 == count * p.parts)
        next_unit, next_part, _ = self._turned(first, count, b.let((turn + 1) * (1 - last)))
        following = p.panel(next_part, next_unit)
        at_end = T.And(last == 1, kb == self.walk.count - 1)
        ahead_line = T.Select(at_end, next_group * p.lines, following * p.lines + (kb + last) * self.walk.lines)
        ahead = b.let(ahead_line * p.columns)

        def row_tile(t: b.Expr, walk: Walk, fetch: Fetch) -> None:
            fewer = self.plan.fewer_rows
            self.tiles.row_tile(tile0 + t, t, [unit], part, [place], walk, kb, fetch, length, fewer)

        def row_tiles(places: int) -> None:
            """All of them; places: at which each fetches with a line."""
            share = b.let(T.truncdiv(length * p.vectors + (here - 1), here))
            with T.serial(here) as t:
                start = b.let(ahead + t * share * b.WIDTH)
                row_tile(t, self.walk, self.fetches.share_of_lines(start, share, places))

        if self.walk.unpacked:
            with T.If(here <= FEW_TILES):
                with T.Then():
                    row_tile(0, self.plan.few, self.fetches.all_lines(ahead, length))
                    with T.serial(1, here) as t:
                        row_tile(t, self.plan.few, Fetch())
                with T.Else():
                    reader.unpack(self.tiles.wide, 0, b.let(p.panel(part, unit) * p.lines + line0), length)
                    row_tiles(1)
        elif p.vectors > 2:
            # A single row tile is computed by other loops.
            with T.If(here == 2):
                with T.Then():
                    row_tiles(b.ceil_div(p.vectors, 2))
                with T.Else():
                    row_tiles(1)
        else:
            row_tiles(1)

    def _panel_behind(self, panel: b.Expr, more_chunks: b.Expr) -> b.Expr:
        """The panel to prefetch after a group of panels that ends before `panel` of the first part.

        After the layer's last panel it is the first one, if the task has more chunks. Otherwise it is the one behind
        the weight, where the next expert's weight begins. Without experts, or at the end of a task's share, this task
        does not read what it names: one block of K is prefetched for others or for nothing.
        """
        p = self.p
        other = T.Select(more_chunks, T.int32(0), T.int32(p.parts * p.panels))
        return b.let(T.Select(panel < p.panels, panel, other))

    def _turned(self, first: b.Expr, count: b.Expr, turn: b.Expr) -> tuple[b.Expr, b.Expr, b.Expr]:
        """(panel, part, place of its sums) of a turn of the group [first, + count)."""
        if self.p.parts == 1:
            return b.let(first + turn), 0, turn
        part = b.let(T.truncdiv(turn, count))
        place = b.let(turn - part * count)
        return b.let(first + place), part, b.let(part * self.plan.group + place)
