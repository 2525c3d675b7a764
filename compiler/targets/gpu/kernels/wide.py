"""Numbers of a KV pool read 8 or 16 bytes at a time."""

from __future__ import annotations

from collections.abc import Callable

from tvm.script.ir_builder import tirx as T

from llmc.compiler.targets.gpu.kernels.fragments import call
from llmc.compiler.targets.reference.kernels.frame import Array, Expr, Frame, let
from llmc.compiler.targets.reference.kernels.kv_pools import Pool

Place = tuple[Expr, Expr, Expr]
"""(block, head, position in the block)."""


class WideRows:
    """Elements of a pool's positions. count: of a read; it divides `width`, and is 1 where they are not aligned.

    begin: the first element of those `width` that are read.
    """

    def __init__(self, k: Frame, pool: Pool, width: int, begin: int = 0) -> None:
        self._k, self._pool = k, pool
        self._bytes = 8 if pool.item_bytes == 1 else 16
        count = self._bytes // pool.item_bytes
        self.count = count if pool.aligned(self._bytes) and width % count == 0 and begin % count == 0 else 1

    def read(self, index: Expr) -> list[Expr]:
        """`count` elements from one at `index`, a multiple of `count` elements behind a position's first one."""
        if self.count == 1:
            return [let(self._pool.number(self._k, index), "float32")]
        words = Array(self._bytes // 4, "uint32")
        call(f"llmc_load{self._bytes}", words.address(0), self._k.address(self._pool.name, index))
        return [let(self._element(words, i), "float32") for i in range(self.count)]

    def _element(self, words: Array, number: int) -> Expr:
        item = self._pool.item_bytes
        per_word = 4 // item
        word = words[number // per_word]
        if per_word == 1:
            return self._pool.decoded(T.reinterpret("float32", word))
        shifted = T.shift_right(T.Cast("int32", word), T.int32(8 * item * (number % per_word)))
        return self._pool.decoded(let(T.bitwise_and(shifted, T.int32((1 << 8 * item) - 1))))


def neighbouring_rows(pool: Pool, place_of: Callable[[Expr], Place], position: Expr, count: int) -> list[Expr]:
    """Indices of the first elements of `count` positions in a pool; `count` divides the first one."""
    if pool.block_size % count:
        return [pool.row(*place_of(let(position + i))) for i in range(count)]
    first = pool.row(*place_of(position))
    return [first, *(let(first + i * pool.width) for i in range(1, count))]
