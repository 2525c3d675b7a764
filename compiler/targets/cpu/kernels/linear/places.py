"""Places of a linear kernel's tile: rows, panels and block of K; and what it prefetches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from llmc.compiler.targets.cpu.kernels import builder as b


@dataclass(frozen=True)
class Walk:
    """Order in which K of a panel is walked: `count` blocks of `lines` lines, each for all row tiles of a chunk.
    unpacked: blocks are read from an unpacked copy on the stack."""

    lines: int
    count: int
    unpacked: bool = False

    @classmethod
    def of_lines(cls, lines: int, most: int, unit: int = 1, *, unpacked: bool = False) -> Walk:
        """Nearly equal blocks of at most `most` times `unit` lines, but at least `unit`."""
        units = b.ceil_div(lines, unit)
        of_block = b.ceil_div(units, b.ceil_div(units, max(1, most))) * unit
        return cls(of_block, b.ceil_div(lines, of_block), unpacked)


@dataclass(frozen=True)
class Fetch:
    """Prefetches for a tile, emitted where the tile reads.

    before_line: before a line of the block. at_line: at vector v of a line. at_group: at the steps or scales of a group
    of numbers. at_turn: before each turn: TURN lines, the lines of a group, or one step of tile registers.
    of_tile: the prefetches of one tile, by its number among the tiles that share them.
    """

    before_line: Callable[[b.Expr], None] | None = None
    at_line: Callable[[b.Expr, int], None] | None = None
    at_group: Callable[[b.Expr], None] | None = None
    at_turn: Callable[[Tile, b.Expr], None] | None = None
    of_tile: Callable[[b.Expr], Fetch] | None = None


@dataclass(frozen=True)
class Tile:
    """Rows of row tile `t` times panels, over block `kb` of K.

    units: the panels, numbered within their part of the weight. places: memory of each panel's sums between blocks.
    t_local: number of the row tile in that memory.
    """

    t: b.Expr
    t_local: b.Expr
    rows: range
    units: list[b.Expr]
    part: b.Expr
    panels: list[b.Expr]
    places: list[b.Expr]
    columns: list[b.Expr]  # first column of each panel
    x0: b.Expr  # start of the row tile in x
    walk: Walk
    kb: b.Expr
    fetch: Fetch
    length: b.Expr = 0  # lines of a block of floats
