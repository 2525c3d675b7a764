"""Weights of 8-bit floats (E4M3), two words per line. As float32, numbers are 2⁸ times too small; this is exact and
corrected at the end."""

from __future__ import annotations

from typing import ClassVar

from llmc.compiler.targets.cpu.kernels import builder as b
from llmc.compiler.targets.cpu.kernels.ir import fp8
from llmc.compiler.targets.cpu.kernels.linear.micro.base import B16X2, F32
from llmc.compiler.targets.cpu.kernels.linear.problem import LINE
from llmc.compiler.targets.cpu.kernels.linear.readers.numbers import Numbers
from llmc.compiler.targets.cpu.target import Target


class E4m3(Numbers):
    units_of: ClassVar = {B16X2: LINE // 2, F32: LINE}
    line_words = 2
    most_streams = 4  # bytes being converted to floats take registers
    unpacked_for_few = True

    @staticmethod
    def helpers(target: Target) -> str:
        return fp8.elements()

    def element(self, word: b.Expr, place: int) -> b.Expr:
        return b.call(f"e4m3_{place % 4}", word)

    @property
    def factor(self) -> float:
        return 2.0**8
