"""Prefetches of a lone query row: the values of its current keys, then the next keys."""

from __future__ import annotations

from collections.abc import Callable

from tvm.script.ir_builder import tirx as T

from llmc.compiler.targets.cpu.kernels import builder as b


class Fetches:
    """Prefetches the cache lines of several blocks of a pool, one line of each block in turn.

    A core reads several pages at once faster than one after another. most: blocks. lines: per block.
    """

    def __init__(self, most: int, lines: int) -> None:
        self._most, self._lines = most, lines
        self._bases = T.alloc_buffer((most,), "int32", scope="local")
        self._count, self._turn, self._line = (T.alloc_buffer((1,), "int32", scope="local") for _ in range(3))

    def begin(self, count: b.Expr, base: Callable[[b.Expr], b.Expr]) -> None:
        """Starts on `count` blocks, possibly 0. base: word offset of a block, by its index."""
        count = b.let(T.min(count, self._most))
        b.store(self._count, count, 0)
        b.store(self._turn, T.int32(0), 0)
        b.store(self._line, T.Cast("int32", count == 0) * self._lines, 0)  # no block: everything counts as fetched
        with T.serial(count) as i:
            b.store(self._bases, base(i), i)

    def fetch(self, pool: b.Expr, lines: int) -> None:
        """Prefetches the next `lines` lines of the current block into L2."""
        with b.when(self._line[0] < self._lines):
            at = b.let(self._bases[self._turn[0]] + self._line[0] * b.WIDTH)
            for j in range(lines):
                b.do("prefetch_l2", b.at(pool, at + j * b.WIDTH))
            b.store(self._turn, self._turn[0] + 1, 0)
            with b.when(self._turn[0] >= self._count[0]):
                b.store(self._turn, T.int32(0), 0)
                b.store(self._line, self._line[0] + lines, 0)
