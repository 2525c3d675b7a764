"""Micro-kernel for CPUs without bf16 multiplication: whole numbers times bf16 activations in fixed point.

Each lane adds two products at a time. Sums of a group are exact integers.
"""

from __future__ import annotations

from tvm.script.ir_builder import tirx as T

from llmc.compiler.targets.cpu.kernels import builder as b
from llmc.compiler.targets.cpu.kernels.ir import fixed
from llmc.compiler.targets.cpu.kernels.linear.fixed_rows import FixedRows
from llmc.compiler.targets.cpu.kernels.linear.micro.base import S16X2, MicroKernel
from llmc.compiler.targets.cpu.kernels.linear.places import Walk
from llmc.compiler.targets.cpu.kernels.linear.problem import Problem

_NUMBERS = (("nibbles", 4), ("fives", 5), ("sixes", 6), ("bytes", 8))
"""(name, bits) of each width of numbers."""


class DotS16(MicroKernel):
    operand, sums = S16X2, "int32"

    @staticmethod
    def suits(p: Problem) -> bool:
        return p.fixed

    def helpers(self) -> str:
        return fixed.dot() + "".join(fixed.pairs(*numbers) for numbers in _NUMBERS) + fixed.rows(self.p.tile)

    def hold(self, tiles: int, middle: int, blocks: tuple[int, Walk] | None) -> None:
        self.rows, self._in_start = FixedRows(self.p, self.x, tiles, middle or 1), middle != 0

    def prepare(self, tile0: b.Expr, tiles: b.Expr) -> None:
        self.rows.make(tile0, tiles)

    def start_of(self, t: b.Expr, t_local: b.Expr) -> b.Expr:
        return t_local * self.rows.tile_words

    def start(self, x0: b.Expr, r: b.Expr, group: b.Expr) -> b.Expr:
        """Correction for `Reader.middle`, the offset of the weight's numbers, or 0."""
        return T.broadcast(self.rows.sum_of(x0, r, group) if self._in_start else T.int32(0), b.WIDTH)

    def multiply(self, acc: b.Expr, weight: b.Expr, value: b.Expr) -> b.Expr:
        return T.call_extern("int32x16", "llmc_dot_s16", acc, weight, value)

    def word(self, at: b.Expr) -> b.Expr:
        return self.rows.memory[at]

    def as_float(self, value: b.Expr, zero: b.Expr | None, x0: b.Expr, r: b.Expr, group: b.Expr) -> b.Expr:
        if zero is not None:
            value = value + zero * T.broadcast(self.rows.sum_of(x0, r, group), b.WIDTH)
        return b.call("mul", T.Cast("float32x16", value), b.splat(self.rows.scale_of(x0, r, group)))

    def sum_of_row(self, x0: b.Expr, r: b.Expr, group: b.Expr) -> b.Expr:
        total = T.Cast("float32", self.rows.sum_of(x0, r, group))
        return b.splat(total * self.rows.scale_of(x0, r, group))
