"""Where a tile of a linear kernel lies: its rows, panels and block of K, and what is fetched meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from llmc.compiler.targets.cpu.kernels import builder as b


@dataclass(frozen=True)
class Walk:
    """How K of a panel is walked: in `count` blocks of `lines` lines, each by all row tiles of a chunk; unpacked: of a
    copy on the stack."""

    lines: int
    count: int
    unpacked: bool = False

    @classmethod
    def of_lines(cls, lines: int, most: int, unit: int = 1, *, unpacked: bool = False) -> Walk:
        """Blocks of at most `most` times `unit` lines, and of at least one, nearly equal."""
        units = b.ceil_div(lines, unit)
        of_block = b.ceil_div(units, b.ceil_div(units, max(1, most))) * unit
        return cls(of_block, b.ceil_div(lines, of_block), unpacked)


@dataclass(frozen=True)
class Fetch:
    """Brings into the cache what is needed later.

    before_line: before a line of the block is read. at_line: as vector v of a line is. at_group: as the steps or
    scales of a group of numbers are.
    at_turn: before each turn, which is TURN lines or a group's, or a step of tile registers.
    of_tile: gives what a tile fetches, by its number among those that share.
    """

    before_line: Callable[[b.Expr], None] | None = None
    at_line: Callable[[b.Expr, int], None] | None = None
    at_group: Callable[[b.Expr], None] | None = None
    at_turn: Callable[[Tile, b.Expr], None] | None = None
    of_tile: Callable[[b.Expr], Fetch] | None = None


@dataclass(frozen=True)
class Tile:
    """Rows of row tile `t` times panels, over block `kb` of K.

    units: the panels within their part of the weight; places: of each one's sums between blocks, in which the row tile
    is number t_local.
    """

    t: b.Expr
    t_local: b.Expr
    rows: range
    units: list[b.Expr]
    part: b.Expr
    panels: list[b.Expr]
    places: list[b.Expr]
    columns: list[b.Expr]  # first one of each panel
    x0: b.Expr  # where the row tile starts in x
    walk: Walk
    kb: b.Expr
    fetch: Fetch
    length: b.Expr = 0  # of a block of floats, in lines
