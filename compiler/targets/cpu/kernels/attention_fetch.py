"""What a lone query row fetches while it computes: values of its keys, then the keys that are read after them."""

from __future__ import annotations

from collections.abc import Callable

from tvm.script.ir_builder import tirx as T

from llmc.compiler.targets.cpu.kernels import builder as b


class Fetches:
    """Goes through the lines of some blocks of a pool, the next of each in turn.

    A core reads several pages at once faster than one after the other. most: blocks; lines: of one.
    """

    def __init__(self, most: int, lines: int) -> None:
        self._most, self._lines = most, lines
        self._bases = T.alloc_buffer((most,), "int32", scope="local")
        self._count, self._turn, self._line = (T.alloc_buffer((1,), "int32", scope="local") for _ in range(3))

    def begin(self, count: b.Expr, base: Callable[[b.Expr], b.Expr]) -> None:
        """The first blocks of `count`, 0 or more. base: where one of them begins, in words."""
        count = b.let(T.min(count, self._most))
        b.store(self._count, count, 0)
        b.store(self._turn, T.int32(0), 0)
        b.store(self._line, T.Cast("int32", count == 0) * self._lines, 0)  # no block: as though all were fetched
        with T.serial(count) as i:
            b.store(self._bases, base(i), i)

    def fetch(self, pool: b.Expr, lines: int) -> None:
        """Brings the next `lines` lines of the block whose turn it is into L2."""
        with b.when(self._line[0] < self._lines):
            at = b.let(self._bases[self._turn[0]] + self._line[0] * b.WIDTH)
            for j in range(lines):
                b.do("prefetch_l2", b.at(pool, at + j * b.WIDTH))
            b.store(self._turn, self._turn[0] + 1, 0)
            with b.when(self._turn[0] >= self._count[0]):
                b.store(self._turn, T.int32(0), 0)
                b.store(self._line, self._line[0] + lines, 0)
