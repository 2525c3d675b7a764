"""The inputs of adapter kernels: tiles of rows that share an adapter, and the slots of a pool."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tvm.script.ir_builder import tirx as T

from llmc.adapter_slot import padded
from llmc.compiler.kernel_spec import KernelSpec, KernelSpecError
from llmc.compiler.targets.cpu.kernels import builder as b

_WORD_BYTES = 4
_HEADER = 2  # words per part (rank, scale) and per tile (slot, count)
AHEAD = 1024
"""Words between what is read of a matrix and what is prefetched meanwhile."""


class Pool:
    """Sizes of an adapter pool, and offsets within a slot, in words. width: floats in a row of `adapter_shrink`
    output. columns, rows: of one expert or head where there are `experts` or `heads`. num_layers: number of pairs of an
    A and a B: of parts, or of heads. panel: words between panels of A. a_of_copy, b_of_copy: words between the A of
    experts or heads, and vectors of columns between their B; 0 if one is of all."""

    def __init__(self, spec: KernelSpec) -> None:
        p = spec.as_dict()

        def numbers(name: str) -> list[int]:
            return [int(value) for value in str(p[name]).split()]

        self.dtype, self.columns, self.rank = str(p["act_dtype"]), int(p["k"]), int(p["rank"])
        self.lanes, self.word = b.lanes_of(self.dtype), b.word_dtype(self.dtype)
        self.rows, self.width, self.tile_rows = numbers("parts"), int(p["width"]), int(p["tile_rows"])
        self.experts = int(p.get("experts", 0))
        self.heads, own = int(p.get("heads", 0)), str(p.get("own", ""))
        if self.heads and self.columns % self.lanes:
            raise KernelSpecError(f"{spec.op}: k {self.columns} of heads is not a multiple of {self.lanes}")
        self.num_layers, copies = self.heads or len(self.rows), self.experts or self.heads
        if self.experts or own == "a":
            self.a_of_copy = b.ceil_div(padded(self.columns), self.lanes) * b.WIDTH
            self.panel = copies * self.a_of_copy
        else:
            self.a_of_copy, self.panel = 0, b.ceil_div(self.columns, self.lanes) * b.WIDTH
        self.b_of_copy = [padded(rows) // b.WIDTH if self.experts or own == "b" else 0 for rows in self.rows]
        self.slot = int(p["slot_bytes"]) // _WORD_BYTES
        self.a, self.b = ([at // _WORD_BYTES for at in numbers(name)] for name in ("a_offsets", "b_offsets"))

    def counts(self) -> list[int]:
        """Numbers of rows computed together: 1, 2, 4, … up to a whole tile."""
        found = [1]
        while found[-1] < self.tile_rows:
            found.append(min(2 * found[-1], self.tile_rows))
        return found

    def fits(self, rows: b.Expr, count: int) -> b.Expr:
        """Whether `count` is the least of `counts` that `rows` rows fit into."""
        fewer = max((one for one in self.counts() if one < count), default=0)
        return T.And(rows > fewer, rows <= count)

    def buffers(self, x: str) -> list[tuple[str, str]]:
        """The buffers of `adapter_expand`; its first operand has words of type `x`."""
        return [("x", x), ("tiles", "int32"), ("pool", self.word), ("out", "float32")]


def chosen(number: b.Expr, starts: list[int], values: list[int]) -> b.Expr:
    """The entry of `values` for the last of `starts` not above `number`."""
    found: b.Expr = T.int32(values[0])
    for start, value in zip(starts[1:], values[1:], strict=True):
        found = T.Select(number >= start, T.int32(value), found)
    return b.let(found)


class Tile:
    """A tile of the input `tiles`, with its adapter's slot in `pool`.

    expert: whose matrices its rows read, if there are experts; `tiles` then has slot · experts + expert.
    """

    def __init__(self, k: b.Kernel, pool: Pool, number: b.Expr) -> None:
        self._k, self._pool = k, pool
        self._at = b.let(number * (_HEADER + pool.tile_rows) + 1)
        slot = b.let(k["tiles"][self._at])
        self.expert = T.int32(0)
        if pool.experts:
            self.expert, slot = b.let(T.truncmod(slot, pool.experts)), b.let(T.truncdiv(slot, pool.experts))
        self.first = b.let(slot * pool.slot)
        self.count = b.let(k["tiles"][self._at + 1])

    def row(self, i: int) -> b.Expr:
        """Row number of the tile's i-th row; past the last one, the last one again."""
        return b.let(self._k["tiles"][self._at + _HEADER + i])

    def _header(self, part: b.Expr, index: int, dtype: str) -> b.Expr:
        word = self._k["pool"][self.first + part * _HEADER + index]
        return word if self._pool.word == dtype else T.reinterpret(dtype, word)

    def rank(self, part: b.Expr) -> b.Expr:
        """The adapter's rank for a part; 0 if the adapter leaves it unchanged."""
        return b.let(self._header(part, 0, "int32"))

    def scale(self, part: b.Expr) -> b.Expr:
        """The adapter's scale for a part, in every lane."""
        return b.splat(self._header(part, 1, "float32"))

    def by_count(self, emit: Callable[[int], None]) -> None:
        """Emits code for each of the pool's counts; a tile uses the smallest that holds its rows."""
        for count in self._pool.counts():
            with b.when(self._pool.fits(self.count, count)):
                emit(count)


@contextmanager
def share_tiles(k: b.Kernel, pool: Pool, pieces: int) -> Iterator[tuple[Tile, b.Expr]]:
    """Loops over this task's share of (tile, piece) pairs."""
    with k.share(b.let(k["tiles"][0] * pieces)) as unit:
        yield Tile(k, pool, b.let(T.truncdiv(unit, pieces))), b.let(T.truncmod(unit, pieces))
