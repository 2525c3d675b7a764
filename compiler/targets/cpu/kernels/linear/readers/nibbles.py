"""Weights of 4-bit numbers: one word per line, the low halves of its bytes first."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from tvm.script.ir_builder import tirx as T

from llmc.compiler.targets.cpu.kernels import builder as b
from llmc.compiler.targets.cpu.kernels.ir import int8
from llmc.compiler.targets.cpu.kernels.linear.micro.base import B16X2, F32, S16X2, U8X4
from llmc.compiler.targets.cpu.kernels.linear.problem import LINE, Problem
from llmc.compiler.targets.cpu.kernels.linear.readers.tables import LookedUp
from llmc.compiler.targets.cpu.target import Target

_MASK = 0x0F0F0F0F


class FourBits(LookedUp):
    count = 16
    units_of: ClassVar[Mapping[str, int]] = {U8X4: 2, S16X2: LINE // 2, B16X2: LINE // 2, F32: LINE}
    look_up: ClassVar[str] = "nibble"
    """The helper that reads the table."""

    def __init__(self, p: Problem, operand: str) -> None:
        super().__init__(p, operand)
        if operand == S16X2:
            self.most_streams = 4  # numbers being converted take registers

    @staticmethod
    def helpers(target: Target) -> str:
        return int8.nibble(target)

    def bytes_of(self, word: b.Expr, half: int) -> b.Expr:
        bits = T.shift_right(word, T.broadcast(T.int32(4), b.WIDTH)) if half else word
        return T.bitwise_and(bits, T.broadcast(T.int32(_MASK), b.WIDTH))

    def pair_of(self, word: b.Expr, half: int, odd: int) -> b.Expr:
        return T.call_extern("int32x16", f"llmc_nibbles_{half + 2 * odd}", word)

    def bit_of(self, half: int, odd: int) -> int:
        return 4 * half + 8 * odd

    def element(self, word: b.Expr, place: int) -> b.Expr:
        bit = (place % 4) * 8 + (place // 4) * 4
        shifted = T.shift_right(word, T.broadcast(T.int32(bit), b.WIDTH)) if bit else word
        return b.call(self.look_up, shifted, self.table[0])
