"""Prefetches while a tile is computed: data that few rows read a little later, or the next block."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tvm.script.ir_builder import tirx as T

from llmc.compiler.targets.cpu.kernels import builder as b
from llmc.compiler.targets.cpu.kernels.linear.places import Fetch, Tile, Walk
from llmc.compiler.targets.cpu.kernels.linear.problem import Problem
from llmc.compiler.targets.cpu.kernels.linear.readers.base import Reader

_CACHE_LINE = 64
_GROUPS_AHEAD = 3
_ROWS_OF_STREAMS = 2  # most rows that read enough panels of numbers side by side to prefetch from these alone


class Fetches:
    """Prefetches of one kernel `k`. ahead_bytes: distance of prefetches, from the kernel's schedule."""

    def __init__(self, p: Problem, k: b.Kernel, reader: Reader, ahead_bytes: int) -> None:
        self.p, self.k, self.reader, self.ahead = p, k, reader, ahead_bytes // 4

    # ---- few rows ---------------------------------------------------------------------------------------------------

    def streams(self, panels: Sequence[b.Expr]) -> Fetch:
        """Prefetches for one row tile, with each line of each panel.

        Few rows prefetch from the same panel, a fixed distance ahead; so do more rows of floats, and of numbers that
        become bf16, further ahead. More rows of other numbers prefetch from the next panels, at one place per vector
        of a line: few streams are slow.
        """
        p, reader = self.p, self.reader
        apart = b.ceil_div(reader.panel_words * p.vectors, reader.line_vectors)

        def fetch(line: b.Expr, v: int) -> None:
            panel, of_panel = panels[v // p.vectors], v % p.vectors
            for place in range(of_panel, reader.line_vectors, p.vectors):
                if not p.quantized or p.paired or p.tile <= _ROWS_OF_STREAMS:
                    at = reader.share(panel, line) + (place * b.WIDTH + self.ahead)
                    if p.fixed:
                        # Behind the panel's end lie the panels read beside it: skip to the first that is not read.
                        past = T.Cast("int32", line >= p.lines - 4 * self.ahead // reader.line_bytes)
                        at = at + past * ((len(panels) - 1) * reader.panel_words * p.columns)
                else:
                    at = reader.position(panel + len(panels), 0) + (line + place * apart) * b.WIDTH
                reader.fetch(at)

        def all_of(line: b.Expr) -> None:
            for v in range(len(panels) * p.vectors):
                fetch(line, v)

        if not p.quantized:
            return Fetch(before_line=all_of)
        beside = self.planes(panels) if p.paired else None
        return Fetch(at_line=fetch, at_group=beside or self.groups(panels, len(panels)))

    def planes(self, panels: Sequence[b.Expr]) -> Callable[[b.Expr], None] | None:
        """Prefetches scales and zero points, a share with each group of numbers, as far ahead as lines. Otherwise the
        sums of a group would wait for its scales. None with a single group."""
        p = self.p
        if p.number_groups == 1:
            return None
        ahead = b.ceil_div(4 * self.ahead, p.number_group_lines * self.reader.line_bytes)

        def fetch(group: b.Expr) -> None:
            for name, plane in p.planes.items():
                share = plane.count * p.columns // p.number_groups
                of_line = _CACHE_LINE // plane.numpy_dtype.itemsize
                for panel in panels:
                    at = b.let(panel * (plane.count * p.columns) + (group + ahead) * share)
                    for place in range(b.ceil_div(share, of_line)):
                        b.do("prefetch", b.at(self.k[name], at + place * of_line))

        return fetch

    def groups(self, panels: Sequence[b.Expr], stride: int) -> Callable[[b.Expr], None] | None:
        """Prefetches what panels store beside numbers: a few groups ahead in `panels`, and the same group in the panels
        `stride` further on. None if the reader has no such data."""
        fetch_group = self.reader.fetch_group
        if fetch_group is None:
            return None

        def fetch(group: b.Expr) -> None:
            for panel in panels:
                fetch_group(panel, group + _GROUPS_AHEAD)
                fetch_group(panel + stride, group)

        return fetch

    # ---- the next block of many rows --------------------------------------------------------------------------------

    def all_lines(self, ahead: b.Expr, length: b.Expr) -> Fetch:
        """A single row tile of floats prefetches the whole block at `ahead`, from several places at once.

        length: vectors between two places.
        """

        def fetch(line: b.Expr) -> None:
            for v in range(self.p.vectors):
                self.reader.fetch(ahead + (v * length + line) * b.WIDTH)

        return Fetch(before_line=fetch)

    def share_of_lines(self, start: b.Expr, share: b.Expr, places: int) -> Fetch:
        """Each row tile of floats prefetches its `share` vectors from `start` on, at `places` places per line. The last
        ones may belong to the next tile's share, which is harmless."""
        apart = b.let(T.truncdiv(share + (places - 1), places)) if places > 1 else 0

        def fetch(line: b.Expr) -> None:
            for place in range(places):
                self.reader.fetch(start + (place * apart + line) * b.WIDTH)

        return Fetch(before_line=fetch)

    def share(self, ahead: b.Expr, walk: Walk, tiles: b.Expr, turn_lines: int) -> Fetch:
        """Each of `tiles` tiles prefetches its share of the block at `ahead`, at several places, and its own output.
        turn_lines: lines per turn."""
        p, reader, turns = self.p, self.reader, b.ceil_div(walk.lines, turn_lines)
        apart = b.ceil_div(walk.lines * reader.line_bytes // (4 * b.WIDTH), reader.line_vectors)
        share = b.let(T.truncdiv(walk.lines + (tiles - 1), tiles))
        of_turn = b.let(T.truncdiv(share + (turns - 1), turns))

        def lines(start: b.Expr, first: b.Expr) -> None:
            with T.serial(of_turn) as i:
                at = b.let(start + (first + i) * b.WIDTH)
                for place in range(reader.line_vectors):
                    reader.fetch(at + place * (apart * b.WIDTH), level=2)

        def fetch(tile: Tile, turn: b.Expr) -> None:
            if tile.rows.start == 0:
                with b.when(turn * of_turn < share):
                    lines(ahead, tile.t_local * share + turn * of_turn)
            if not p.activated:
                self._output(tile, turn, turns)

        def of_tile(t_local: b.Expr) -> Fetch:
            mine = b.let(ahead + t_local * share * b.WIDTH)
            return Fetch(at_turn=lambda _, turn: lines(mine, turn * of_turn))

        return Fetch(at_turn=fetch) if p.quantized else Fetch(of_tile=of_tile)

    def _output(self, tile: Tile, turn: b.Expr, turns: int) -> None:
        """Prefetches a share of the rows of y that a tile will write, and of the residual that it will add. turns:
        turns per block."""
        p = self.p
        share = b.ceil_div(len(tile.rows), turns)
        with b.when(T.And(tile.kb == tile.walk.count - 1, turn * share < len(tile.rows))):
            for i in range(share):
                row = tile.t * p.tile + (tile.rows.start + i) + turn * share
                at = b.let(row * p.width + tile.units[0] * p.columns)
                for v in range(p.vectors):
                    b.do("prefetch_write", b.at(self.k["y"], at + v * b.WIDTH))
                    if p.residual:
                        b.do("prefetch", b.at(self.k["residual"], at + v * b.WIDTH))
