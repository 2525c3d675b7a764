"""Weights of floats: a line is one word of K, which is one float32 or two 16-bit floats."""

from __future__ import annotations

from typing import ClassVar

from llmc.compiler.targets.cpu.kernels import builder as b
from llmc.compiler.targets.cpu.kernels.linear.micro.base import BF16X2, F32
from llmc.compiler.targets.cpu.kernels.linear.readers.base import OfGroup, Reader


class Float32(Reader):
    units_of: ClassVar = {F32: 1}

    def operand_of(self, word: b.Expr, unit: int, of_group: OfGroup | None, v: int) -> b.Expr:
        return word


class Halves(Reader):
    """16-bit floats."""

    units_of: ClassVar = {F32: 2}

    def operand_of(self, word: b.Expr, unit: int, of_group: OfGroup | None, v: int) -> b.Expr:
        return b.halves_of(self.p.kind, word, unit)


class Bfloat16(Halves):
    units_of: ClassVar = {BF16X2: 1, F32: 2}

    def operand_of(self, word: b.Expr, unit: int, of_group: OfGroup | None, v: int) -> b.Expr:
        return word if self.operand == BF16X2 else super().operand_of(word, unit, of_group, v)
