"""bf16 times bf16, two products per lane, where a vector instruction exists for it."""

from __future__ import annotations

from llmc.compiler.targets.cpu.kernels import builder as b
from llmc.compiler.targets.cpu.kernels.ir import bf16
from llmc.compiler.targets.cpu.kernels.linear.micro.base import BF16X2, MicroKernel
from llmc.compiler.targets.cpu.kernels.linear.problem import Problem


class DotBf16(MicroKernel):
    operand = BF16X2

    @staticmethod
    def suits(p: Problem) -> bool:
        return p.act == "bf16" and p.target.bf16_dot

    def helpers(self) -> str:
        return bf16.dot()

    def multiply(self, acc: b.Expr, weight: b.Expr, value: b.Expr) -> b.Expr:
        return b.call("dot_bf16", acc, value, weight)
