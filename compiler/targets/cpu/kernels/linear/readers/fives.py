"""Weights of 5-bit numbers: a word a line, and one for each four lines behind theirs.

A half of a line's word has three numbers of 5 bits and the top bit of the fourth, whose other bits are in the fifth
word: the line's pairs (0, 2), (1, 3), (4, 6) are in the lowest bits of 16-bit lanes after a shift, and (5, 7) is made.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from tvm.script.ir_builder import tirx as T

from llmc.compiler.targets.cpu.kernels import builder as b
from llmc.compiler.targets.cpu.kernels.ir import fives
from llmc.compiler.targets.cpu.kernels.linear.micro.base import B16X2, F32, S16X2
from llmc.compiler.targets.cpu.kernels.linear.problem import LINE, Problem
from llmc.compiler.targets.cpu.kernels.linear.readers.tables import LookedUp
from llmc.compiler.targets.cpu.quant_packing import FIVES_LINES
from llmc.compiler.targets.cpu.target import Target

_SET_WORDS = FIVES_LINES + 1
_LAST = 3
"""The pair that is made."""


class FiveBits(LookedUp):
    """Word 0 of a line is as it lies, word 1 has the last pair."""

    count = 32
    units_of: ClassVar[Mapping[str, int]] = {S16X2: LINE // 2, B16X2: LINE // 2, F32: LINE}
    line_words = 2

    def __init__(self, p: Problem, operand: str) -> None:
        super().__init__(p, operand)
        self.panel_words = b.ceil_div(p.lines, FIVES_LINES) * _SET_WORDS
        self.line_vectors = b.ceil_div(_SET_WORDS * p.vectors, FIVES_LINES)
        self.line_bytes = 4 * p.columns * _SET_WORDS // FIVES_LINES
        self.unpacked_for_few = operand == F32
        self.most_streams = 4  # numbers on their way take registers

    @staticmethod
    def helpers(target: Target) -> str:
        return fives.helpers(target)

    def position(self, panel: b.Expr, line: b.Expr) -> b.Expr:
        return (panel * self.panel_words + line + T.shift_right(line, T.int32(2))) * self.p.columns

    def share(self, panel: b.Expr, line: b.Expr) -> b.Expr:
        vectors = T.shift_right(line * (_SET_WORDS * self.p.vectors), T.int32(2))
        return panel * (self.panel_words * self.p.columns) + vectors * b.WIDTH

    def word_of(self, unit: int) -> int:
        return int(_pair_of(unit)[0] == _LAST if self.operand == F32 else unit == _LAST)

    def word(self, panel: b.Expr, line: b.Expr, v: int, i: int) -> b.Expr:
        word = super().word(panel, line, v, 0)
        if i == 0:
            return word
        of_set = panel * self.panel_words + T.shift_right(line, T.int32(2)) * _SET_WORDS + FIVES_LINES
        others = self.w[T.ramp(of_set * self.p.columns + v * b.WIDTH, 1, b.WIDTH)]
        bit = T.bitwise_and(line, T.int32(FIVES_LINES - 1)) * 4
        return b.kept(T.call_extern("int32x16", "llmc_fives_3", word, others, bit), "int32")

    def pair_of(self, word: b.Expr, half: int, odd: int) -> b.Expr:
        pair = 2 * half + odd
        return word if pair == _LAST else T.call_extern("int32x16", f"llmc_fives_{pair}", word)

    def bit_of(self, half: int, odd: int) -> int:
        return _bit_of(2 * half + odd)

    def element(self, word: b.Expr, place: int) -> b.Expr:
        pair, high = _pair_of(place)
        bit = 16 * high + _bit_of(pair)
        shifted = T.shift_right(word, T.broadcast(T.int32(bit), b.WIDTH)) if bit else word
        return b.call("five", shifted, self.table[0], self.table[1])


def _bit_of(pair: int) -> int:
    """The lowest bit of a pair in the word that it is in."""
    return 0 if pair == _LAST else 5 * pair


def _pair_of(element: int) -> tuple[int, int]:
    """The pair of an element of a line, and which of the two it is."""
    return element % 2 + element // 4 * 2, element // 2 % 2
