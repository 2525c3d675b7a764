"""Unsigned bytes of the weight times signed bytes of activations, four products per lane: sums are exact integers.

It uses one instruction where available, else several with the same result.
"""

from __future__ import annotations

from tvm.script.ir_builder import tirx as T

from llmc.compiler.targets.cpu.kernels import builder as b
from llmc.compiler.targets.cpu.kernels.ir import int8
from llmc.compiler.targets.cpu.kernels.linear.micro.base import U8X4, MicroKernel
from llmc.compiler.targets.cpu.kernels.linear.problem import Problem


class DotU8S8(MicroKernel):
    operand, sums = U8X4, "int32"

    @staticmethod
    def suits(p: Problem) -> bool:
        return p.integer

    def helpers(self) -> str:
        return int8.dot(self.p.target)

    def _sum_of(self, x0: b.Expr, r: b.Expr, group: b.Expr) -> b.Expr:
        """Sum of the quantized activations of a row in a group, times the factor of the format's `Sums`."""
        return T.broadcast(self.x[x0 + (group + (self.p.x_words + 1)) * self.p.tile + r], b.WIDTH)

    def start(self, x0: b.Expr, r: b.Expr, group: b.Expr) -> b.Expr:
        """Correction for a fixed zero point, or 0."""
        return T.broadcast(T.int32(0), b.WIDTH) if self.p.asymmetric else self._sum_of(x0, r, group)

    def multiply(self, acc: b.Expr, weight: b.Expr, value: b.Expr) -> b.Expr:
        return T.call_extern("int32x16", "llmc_dot_u8s8", acc, weight, value)

    def as_float(self, value: b.Expr, zero: b.Expr | None, x0: b.Expr, r: b.Expr, group: b.Expr) -> b.Expr:
        if zero is not None:
            value = value + zero * self._sum_of(x0, r, group)
        return T.Cast("float32x16", value)

    def row_factor(self, x0: b.Expr, r: b.Expr) -> b.Expr:
        return b.splat(T.reinterpret("float32", self.x[x0 + self.p.x_words * self.p.tile + r]))
