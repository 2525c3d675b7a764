"""The inputs of adapter kernels: tiles of rows that share an adapter, and the slots of a pool."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tvm.script.ir_builder import tirx as T

from llmc.compiler.kernel_spec import KernelSpec
from llmc.compiler.targets.cpu.kernels import builder as b

_WORD_BYTES = 4
_HEADER = 2  # words per part (rank, scale) and per tile (slot, count)


class Pool:
    """Sizes of an adapter pool, and offsets within a slot, in words. width: floats in a row of `adapter_shrink`
    output."""

    def __init__(self, spec: KernelSpec) -> None:
        p = spec.as_dict()

        def numbers(name: str) -> list[int]:
            return [int(value) for value in str(p[name]).split()]

        self.dtype, self.columns, self.rank = str(p["act_dtype"]), int(p["k"]), int(p["rank"])
        self.lanes, self.word = b.lanes_of(self.dtype), b.word_dtype(self.dtype)
        self.rows, self.width, self.tile_rows = numbers("parts"), int(p["width"]), int(p["tile_rows"])
        self.slot = int(p["slot_bytes"]) // _WORD_BYTES
        self.a, self.b = ([at // _WORD_BYTES for at in numbers(name)] for name in ("a_offsets", "b_offsets"))

    def buffers(self, x: str) -> list[tuple[str, str]]:
        """The buffers of a kernel whose first operand has words of type `x`."""
        return [("x", x), ("tiles", "int32"), ("pool", self.word), ("out", "float32")]


def chosen(number: b.Expr, starts: list[int], values: list[int]) -> b.Expr:
    """The entry of `values` for the last of `starts` not above `number`."""
    found: b.Expr = T.int32(values[0])
    for start, value in zip(starts[1:], values[1:], strict=True):
        found = T.Select(number >= start, T.int32(value), found)
    return b.let(found)


class Tile:
    """A tile of the input `tiles`, with its adapter's slot in `pool`."""

    def __init__(self, k: b.Kernel, pool: Pool, number: b.Expr) -> None:
        self._k, self._rows, self._word = k, pool.tile_rows, pool.word
        self._at = b.let(number * (_HEADER + pool.tile_rows) + 1)
        self.first = b.let(k["tiles"][self._at] * pool.slot)
        self.count = b.let(k["tiles"][self._at + 1])

    def row(self, i: int) -> b.Expr:
        """Row number of the tile's i-th row; past the last one, the last one again."""
        return b.let(self._k["tiles"][self._at + _HEADER + i])

    def _header(self, part: b.Expr, index: int, dtype: str) -> b.Expr:
        word = self._k["pool"][self.first + part * _HEADER + index]
        return word if self._word == dtype else T.reinterpret(dtype, word)

    def rank(self, part: b.Expr) -> b.Expr:
        """The adapter's rank for a part; 0 if the adapter leaves it unchanged."""
        return b.let(self._header(part, 0, "int32"))

    def scale(self, part: b.Expr) -> b.Expr:
        """The adapter's scale for a part, in every lane."""
        return b.splat(self._header(part, 1, "float32"))

    def by_count(self, emit: Callable[[int], None]) -> None:
        """Emits code for 1, 2, 4, … rows computed together; a tile uses the smallest that holds its rows."""
        fewer, count = 0, 1
        while fewer < self._rows:
            with b.when(T.And(self.count > fewer, self.count <= count)):
                emit(count)
            fewer, count = count, min(2 * count, self._rows)


@contextmanager
def share_tiles(k: b.Kernel, pool: Pool, pieces: int) -> Iterator[tuple[Tile, b.Expr]]:
    """Loops over this task's share of (tile, piece) pairs."""
    with k.share(b.let(k["tiles"][0] * pieces)) as unit:
        yield Tile(k, pool, b.let(T.truncdiv(unit, pieces))), b.let(T.truncmod(unit, pieces))
