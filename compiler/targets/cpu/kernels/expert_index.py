"""Which rows each expert in use has: the index that `expert_order` writes and the other kernels of experts read.

Experts in use are numbered, by id. The index is int32, in this order:
- how many are in use;
- by number: the id, the first row, the count of rows, the row tile, and the cost of all before, of which there is one
  more;
- by id: the number;
- the row of each pair of a token and one of its experts, in the order of tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext

from tvm.script.ir_builder import tirx as T

from llmc.compiler.kernel_spec import Param
from llmc.compiler.targets.cpu.kernels import builder as b


class ExpertIndex:
    """Of a kernel's buffer `index`, for so many experts."""

    def __init__(self, index: b.Expr, experts: int) -> None:
        self.index, self._experts = index, experts

    @property
    def in_use(self) -> b.Expr:
        return self.index[0]

    def expert_at(self, number: b.Expr) -> b.Expr:
        """Where the id of an expert in use is."""
        return 1 + number

    def first_at(self, number: b.Expr) -> b.Expr:
        return 1 + self._experts + number

    def rows_at(self, number: b.Expr) -> b.Expr:
        return 1 + 2 * self._experts + number

    def tile_at(self, number: b.Expr) -> b.Expr:
        return 1 + 3 * self._experts + number

    def cost_at(self, number: b.Expr) -> b.Expr:
        """Where the cost of all experts before one in use is; of the number after the last one: of all."""
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
    """The row tiles that experts have in a graph whose largest is this."""
    return tuple(1 << i for i in range(largest.bit_length()))


def tile_of(rows: b.Expr, largest: int) -> b.Expr:
    """The smallest tile that holds so many rows, or the largest there is."""
    tile = T.int32(largest)
    for smaller in reversed(row_tiles(largest)[:-1]):
        tile = T.Select(rows <= smaller, T.int32(smaller), tile)
    return tile
