"""Loops for few rows. They read the weight at several places at once, which is fastest for a core.

`side_by_side`: one row tile times several panels, with all sums in registers. `StreamedBlocks`: for exact sums, where a
row tile fills the registers with one panel. Panels of a group take turns with short blocks of K, and the sums of the
others wait in L1.
"""

from __future__ import annotations

from tvm.script.ir_builder import tirx as T

from llmc.compiler.targets.cpu.kernels import builder as b
from llmc.compiler.targets.cpu.kernels.linear.fetch import Fetches
from llmc.compiler.targets.cpu.kernels.linear.places import Fetch, Walk
from llmc.compiler.targets.cpu.kernels.linear.plan import Plan
from llmc.compiler.targets.cpu.kernels.linear.problem import Problem
from llmc.compiler.targets.cpu.kernels.linear.readers.numbers import Numbers
from llmc.compiler.targets.cpu.kernels.linear.sums import Sums
from llmc.compiler.targets.cpu.kernels.linear.vector_tiles import VectorTiles


class _PanelGroups:
    """This task's share of the panels, in nearly equal groups of at most `most`, because few streams are slow."""

    def __init__(self, k: b.Kernel, panels: int, most: int) -> None:
        self._panel0, panel1 = k.share_bounds(panels)
        self.panels = b.let(panel1 - self._panel0)
        self.count = b.let(T.truncdiv(self.panels + (most - 1), most))

    def span(self, group: b.Expr) -> tuple[b.Expr, b.Expr]:
        """(first panel of a group, number of its panels)."""
        first = b.let(self._panel0 + T.truncdiv(group * self.panels, self.count))
        return first, b.let(self._panel0 + T.truncdiv((group + 1) * self.panels, self.count) - first)


def side_by_side(tiles: VectorTiles, row_tiles: b.Expr, most: int, fetches: Fetches) -> None:
    """Row tiles × groups of at most `most` panels."""
    p = tiles.p
    groups, whole = _PanelGroups(tiles.k, p.panels, most), Walk(p.lines, 1)
    tiles = tiles.with_sums(p.parts * most)
    with T.serial(row_tiles) as t:
        tiles.micro.prepare(t, 1)
        with T.serial(groups.count) as group:
            first, size = groups.span(group)
            with T.serial(p.parts) as part:
                for some in range(1, most + 1):
                    with b.when(size == some):
                        units = [b.let(first + i) for i in range(some)]
                        places = [part * most + i for i in range(some)]
                        fetch = fetches.streams([b.let(p.panel(part, unit)) for unit in units])
                        tiles.row_tile(t, 0, units, part, places, whole, T.int32(0), fetch)
            if p.activated:
                with T.serial(size) as i:
                    tiles.write_activated(first + i, [part * most + i for part in range(p.parts)], t, 0)


class StreamedBlocks:
    """Emits the loops of a kernel."""

    def __init__(self, p: Problem, k: b.Kernel, num_rows: b.Expr, plan: Plan, fetches: Fetches) -> None:
        reader = plan.reader
        assert isinstance(reader, Numbers)
        self.p, self.k, self.reader, self.fetches = p, k, reader, fetches
        unit = p.number_group_lines if p.number_groups > 1 else 1
        self.walk = Walk.of_lines(p.lines, reader.stream_bytes // (reader.line_bytes * unit), unit)
        self.most = max(1, min(plan.streams // p.parts, p.panels))
        sums = Sums(self.most * p.parts, 1, p.tile, p.columns)
        self.tiles = VectorTiles(p, k, num_rows, plan.reader, plan.micro, sums, None)
        self.cursor = _Cursor(self.reader)
        self.line_fetches = self.reader.line_vectors // self.cursor.at_once
        self.block_fetches = self.walk.lines * self.line_fetches

    def run(self, row_tiles: b.Expr) -> None:
        """Row tiles × groups of panels × blocks of K × panels."""
        p, groups = self.p, _PanelGroups(self.k, self.p.panels, self.most)
        with b.when(groups.panels > 0), T.serial(p.parts) as part:
            first, size = groups.span(T.int32(0))
            self.cursor.begin(p.panel(part, first), size, T.int32(0))
            with T.serial(size * self.block_fetches):
                self.cursor.fetch()
        with T.serial(row_tiles) as t, T.serial(groups.count) as g:
            group = b.let(g)
            first, size = groups.span(group)
            with T.serial(self.walk.count) as block, T.serial(p.parts) as part:
                kb = b.let(block)
                last = b.let(T.Cast("int32", kb == self.walk.count - 1))
                following, its_size = groups.span(b.let(T.min(group + last, groups.count - 1)))
                line = b.let((kb + 1) * (1 - last) * self.walk.lines)
                self.cursor.begin(p.panel(part, following), its_size, line)
                with T.serial(size) as i:
                    place = b.let(part * self.most + i)
                    panel = b.let(p.panel(part, first + i))
                    fetch = Fetch(at_line=self._fetch, at_group=self.fetches.groups([panel], self.most))
                    self.tiles.row_tile(t, 0, [first + i], part, [place], self.walk, kb, fetch)
            if p.activated:
                # Memory would be idle meanwhile: the next group's first block is in cache, its second one, if any, is
                # not.
                meanwhile = self._fetch_block if self.walk.count > 1 else None
                following, its_size = groups.span(b.let(T.min(group + 1, groups.count - 1)))
                self.cursor.begin(p.panel(0, following), its_size, T.int32(self.walk.lines))
                with T.serial(size) as i:
                    places = [part * self.most + i for part in range(p.parts)]
                    self.tiles.write_activated(first + i, places, t, 0, meanwhile)

    def _fetch(self, _line: b.Expr, v: int) -> None:
        """Prefetches as many vectors as are read from a line meanwhile."""
        if v < self.line_fetches:
            self.cursor.fetch()

    def _fetch_block(self) -> None:
        """Prefetches a share of a panel's block, rounded up, while a vector of its columns is written."""
        with T.serial(b.ceil_div(self.block_fetches, self.p.vectors)):
            self.cursor.fetch()


class _Cursor:
    """Walks over lines of neighbouring panels, one line or vector of each in turn."""

    def __init__(self, reader: Numbers) -> None:
        self.at_once, self._level = reader.stream_vectors, reader.stream_level
        self._reader = reader
        self._stride = reader.panel_words * reader.p.columns
        self._at, self._turn, self._panels, self._back = (
            T.alloc_buffer((1,), "int32", scope="local") for _ in range(4)
        )

    def begin(self, panel: b.Expr, panels: b.Expr, line: b.Expr) -> None:
        """Starts at `line` of `panels` panels, the first of which is `panel`."""
        b.store(self._at, self._reader.position(panel, line), 0)
        b.store(self._turn, T.int32(0), 0)
        b.store(self._panels, panels, 0)
        b.store(self._back, self.at_once * b.WIDTH - (panels - 1) * self._stride, 0)

    def fetch(self) -> None:
        """Prefetches the next `at_once` vectors."""
        for i in range(self.at_once):
            self._reader.fetch(self._at[0] + i * b.WIDTH, self._level)
        b.store(self._turn, self._turn[0] + 1, 0)
        past = b.let(T.Cast("int32", self._turn[0] == self._panels[0]))
        b.store(self._at, self._at[0] + (self._stride + past * (self._back[0] - self._stride)), 0)
        b.store(self._turn, self._turn[0] * (1 - past), 0)
