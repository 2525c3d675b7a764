"""Weights with one word per line, and one extra word behind a set of lines (`quant_packing.SHARING_LINES`).

The operands of a line are in two words: its own, and a second one, assembled from its own and the set's extra word.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from tvm.script.ir_builder import tirx as T

from llmc.compiler.targets.cpu.kernels import builder as b
from llmc.compiler.targets.cpu.kernels.linear.micro.base import B16X2, F32, S16X2
from llmc.compiler.targets.cpu.kernels.linear.problem import LINE, Problem
from llmc.compiler.targets.cpu.kernels.linear.readers.tables import LookedUp
from llmc.compiler.targets.cpu.quant_packing import SHARING_LINES


class Sharing(LookedUp):
    """Common to such weights.

    bits: bits per number. second: helper that assembles a line's second word. It takes the line's word, the extra word,
    and the bit in each half of the extra word at which the line's bits begin.
    """

    units_of: ClassVar[Mapping[str, int]] = {S16X2: LINE // 2, B16X2: LINE // 2, F32: LINE}
    line_words = 2
    bits: ClassVar[int]
    second: ClassVar[str]

    def __init__(self, p: Problem, operand: str) -> None:
        super().__init__(p, operand)
        self.lines_of_set = SHARING_LINES[self.bits]
        self.set_words = self.lines_of_set + 1
        self.panel_words = b.ceil_div(p.lines, self.lines_of_set) * self.set_words
        self.line_vectors = b.ceil_div(self.set_words * p.vectors, self.lines_of_set)
        self.line_bytes = 4 * p.columns * self.set_words // self.lines_of_set
        self.unpacked_for_few = operand == F32
        self.most_streams = 4  # numbers being converted take registers

    def _set_of(self, lines: b.Expr) -> b.Expr:
        return T.shift_right(lines, T.int32(self.lines_of_set.bit_length() - 1))

    def position(self, panel: b.Expr, line: b.Expr) -> b.Expr:
        return (panel * self.panel_words + line + self._set_of(line)) * self.p.columns

    def share(self, panel: b.Expr, line: b.Expr) -> b.Expr:
        vectors = self._set_of(line * (self.set_words * self.p.vectors))
        return panel * (self.panel_words * self.p.columns) + vectors * b.WIDTH

    def word(self, panel: b.Expr, line: b.Expr, v: int, i: int) -> b.Expr:
        word = super().word(panel, line, v, 0)
        if i == 0:
            return word
        of_set = panel * self.panel_words + self._set_of(line) * self.set_words + self.lines_of_set
        shared = self.w[T.ramp(of_set * self.p.columns + v * b.WIDTH, 1, b.WIDTH)]
        bit = T.bitwise_and(line, T.int32(self.lines_of_set - 1)) * (16 // self.lines_of_set)
        return b.kept(T.call_extern("int32x16", f"llmc_{self.second}", word, shared, bit), "int32")


def pair_of(element: int) -> tuple[int, int]:
    """(number of the pair, 0 or 1): the pair of a line's element, and the element's place in it."""
    return element % 2 + element // 4 * 2, element // 2 % 2
