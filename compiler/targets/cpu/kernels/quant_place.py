"""Where a register tile of `linear_quant` lies: its rows, panels and block of K, and what is fetched meanwhile."""

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
    unpacked: bool


@dataclass(frozen=True)
class Fetch:
    """Brings into the cache what is needed later. at_line: as vector v of a line of the block is read; at_group: as the
    steps of a group of numbers are; at_turn: before each turn, which is TURN lines or a group's."""

    at_line: Callable[[b.Expr, int], None] | None = None
    at_group: Callable[[b.Expr], None] | None = None
    at_turn: Callable[[Tile, b.Expr], None] | None = None


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
    x0: b.Expr  # where the row tile starts in x
    walk: Walk
    kb: b.Expr
    fetch: Fetch
