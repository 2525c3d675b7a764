"""Weights of numbers whose lines have a word each, and share one behind theirs (`quant_packing.SHARING_LINES`).

Operands of a line are in two words. The first is as it lies, the second is made of it and of the shared one.
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
    """bits: of a number; second: the helper that makes the second word of a line, from the first one, the shared one
    and the bit of its halves at which those of the line begin."""

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
        self.most_streams = 4  # numbers on their way take registers

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
    """The pair of an element of a line, and which of the two it is."""
    return element % 2 + element // 4 * 2, element // 2 % 2
