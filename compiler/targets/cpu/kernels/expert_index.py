"""The index of rows per expert: written by `expert_order`, read by the other expert kernels.

Experts in use are numbered in order of id. The index is int32, in this order:
- the number of experts in use;
- per number: id, first row, row count, row tile, and the total cost of earlier experts, which has one more;
- per id: the number;
- the row of each (token, expert) pair, in token order.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext

from tvm.script.ir_builder import tirx as T

from llmc.compiler.kernel_spec import Param
from llmc.compiler.targets.cpu.kernels import builder as b


class ExpertIndex:
    """Accesses a kernel's buffer `index`, for a given number of experts."""

    def __init__(self, index: b.Expr, experts: int) -> None:
        self.index, self._experts = index, experts

    @property
    def in_use(self) -> b.Expr:
        return self.index[0]

    def expert_at(self, number: b.Expr) -> b.Expr:
        """Position of an expert's id, by number."""
        return 1 + number

    def first_at(self, number: b.Expr) -> b.Expr:
        return 1 + self._experts + number

    def rows_at(self, number: b.Expr) -> b.Expr:
        return 1 + 2 * self._experts + number

    def tile_at(self, number: b.Expr) -> b.Expr:
        return 1 + 3 * self._experts + number

    def cost_at(self, number: b.Expr) -> b.Expr:
        """Position of the total cost of experts before `number`; one past the last gives the cost of all."""
        return 1 + 4 * self._experts + number

    def number_at(self, expert: b.Expr) -> b.Expr:
        return 2 + 5 * self._experts + expert

    def row_at(self, pair: b.Expr) -> b.Expr:
        return 2 + 6 * self._experts + pair

    def __getitem__(self, place: b.Expr) -> b.Expr:
        return self.index[place]

    def put(self, value: b.Expr, place: b.Expr) -> None:
        b.store(self.index, value, place)


def where_held(params: Mapping[str, Param], expert: b.Expr) -> AbstractContextManager[object]:
    """For an expert that is here: with `some` of them, the id of one that is elsewhere is their number."""
    return b.when(expert < int(params["experts"])) if params.get("some") else nullcontext()


def row_tiles(largest: int) -> tuple[int, ...]:
    """The row tiles used in a graph whose largest row tile is `largest`."""
    return tuple(1 << i for i in range(largest.bit_length()))


def tile_of(rows: b.Expr, largest: int) -> b.Expr:
    """The smallest row tile that holds `rows` rows, or the largest there is."""
    tile = T.int32(largest)
    for smaller in reversed(row_tiles(largest)[:-1]):
        tile = T.Select(rows <= smaller, T.int32(smaller), tile)
    return tile
