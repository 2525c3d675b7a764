"""Weights of 4-bit numbers: a word a line, the low halves of its bytes first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import numpy as np
from tvm.script.ir_builder import tirx as T

from llmc.compiler.targets.cpu.kernels import builder as b
from llmc.compiler.targets.cpu.kernels.ir import int8
from llmc.compiler.targets.cpu.kernels.linear.micro.base import B16X2, F32, S16X2, U8X4
from llmc.compiler.targets.cpu.kernels.linear.problem import LINE, Problem
from llmc.compiler.targets.cpu.kernels.linear.readers.numbers import Numbers
from llmc.compiler.targets.cpu.target import Target

_MASK = 0x0F0F0F0F
_MIDDLE = 8


class FourBits(Numbers):
    """As floats they are looked up in a table, less the middle of their range unless a zero point is stored."""

    units_of: ClassVar[Mapping[str, int]] = {U8X4: 2, S16X2: LINE // 2, B16X2: LINE // 2, F32: LINE}
    look_up: ClassVar[str] = "nibble"
    """The helper that reads the table."""

    def __init__(self, p: Problem, operand: str) -> None:
        super().__init__(p, operand)
        if operand == S16X2:
            self.most_streams = 4  # numbers on their way take registers

    @staticmethod
    def helpers(target: Target) -> str:
        return int8.nibble(target)

    def bind(self, k: b.Kernel) -> None:
        super().bind(k)
        if self.operand == F32:
            self.table = T.alloc_buffer((b.WIDTH,), "float32", scope="local")
            for i, value in enumerate(self.table_values()):
                b.store(self.table, T.float32(value), i)
        if self.operand == B16X2:
            self.table = T.alloc_buffer((b.WIDTH,), "int32", scope="local")
            for i, word in enumerate(pairs_of_table(self.table_values())):
                b.store(self.table, T.int32(word), i)

    def table_values(self) -> Sequence[float]:
        """What the 16 numbers become as floats."""
        return [i - self.middle for i in range(b.WIDTH)]

    @property
    def middle(self) -> int:
        """What floats are lowered by, too."""
        return 0 if self.p.asymmetric else _MIDDLE

    def bytes_of(self, word: b.Expr, half: int) -> b.Expr:
        bits = T.shift_right(word, T.broadcast(T.int32(4), b.WIDTH)) if half else word
        return T.bitwise_and(bits, T.broadcast(T.int32(_MASK), b.WIDTH))

    def pair_of(self, word: b.Expr, half: int, odd: int) -> b.Expr:
        return T.call_extern("int32x16", f"llmc_nibbles_{half + 2 * odd}", word)

    def bf16_of(self, word: b.Expr, half: int, odd: int) -> b.Expr:
        bit = 4 * half + 8 * odd
        return T.call_extern("int32x16", f"llmc_looked_up_{bit}", word, self.table[T.ramp(0, 1, b.WIDTH)])

    def element(self, word: b.Expr, place: int) -> b.Expr:
        bit = (place % 4) * 8 + (place // 4) * 4
        shifted = T.shift_right(word, T.broadcast(T.int32(bit), b.WIDTH)) if bit else word
        return b.call(self.look_up, shifted, self.table[T.ramp(0, 1, b.WIDTH)])


def is_bf16(values: Sequence[float]) -> bool:
    """Whether every number of a table is a bf16."""
    return not (np.asarray(values, np.float32).view(np.uint32) & 0xFFFF).any()


def pairs_of_table(values: Sequence[float]) -> list[int]:
    """32 numbers that are bf16 in words of two; 16 lie there twice, so that a fifth bit does not matter."""
    halves = np.asarray(values, np.float32).view(np.uint32) >> 16
    words = halves[0::2] | halves[1::2] << 16
    return [*words.view(np.int32).tolist()] * (b.WIDTH // len(words))
