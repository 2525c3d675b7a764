"""Words of 32 bits that an item reads 4, 8 or 16 bytes at a time, and the numbers in them."""

from __future__ import annotations

from tvm.script.ir_builder import tirx as T

from llmc.compiler.targets.gpu.kernels.fragments import call
from llmc.compiler.targets.reference.kernels.frame import Array, Expr, Frame


def load_words(k: Frame, name: str, at_a_time: int, size: int, at: Expr, item_bytes: int) -> Array:
    """`size` bytes of a buffer from element `at` on, which has `item_bytes`. Each read has `at_a_time` bytes."""
    words = Array(size // 4, "uint32")
    for first in range(0, size, at_a_time):
        call(f"llmc_load{at_a_time}", words.address(first // 4), k.address(name, at + first // item_bytes))
    return words


def part_of(words: Array, i: Expr, bits: int) -> Expr:
    """Unsigned number i of those that words are made of, as int32."""
    per_word = 32 // bits
    up = T.truncmod(i, per_word) * bits
    return T.bitwise_and(T.shift_right(T.Cast("int32", words[T.truncdiv(i, per_word)]), up), T.int32((1 << bits) - 1))
