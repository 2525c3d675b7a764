"""Floats: fused multiply-add, in every instruction set. Activations are float32, or 16-bit and converted to it."""

from __future__ import annotations

from collections.abc import Callable

from llmc.compiler.targets.cpu.kernels import builder as b
from llmc.compiler.targets.cpu.kernels.linear.micro.base import F32, BlockMicroKernel
from llmc.compiler.targets.cpu.kernels.linear.places import Tile, Walk
from llmc.compiler.targets.cpu.kernels.linear.problem import Problem
from llmc.compiler.targets.cpu.kernels.linear.widened import WideRows


class Fma(BlockMicroKernel):
    """wide: 16-bit activations of a block that were converted to float32 once for all panels."""

    operand = F32

    def __init__(self, p: Problem, wide: WideRows | None = None) -> None:
        super().__init__(p)
        self.wide = wide

    @staticmethod
    def suits(p: Problem) -> bool:
        return not p.integer

    def in_blocks(self, k: b.Kernel, tiles: int, walk: Walk) -> Fma:
        micro = Fma(self.p, WideRows(self.p, tiles, walk.lines))
        micro.bind(k)
        return micro

    def prepare_block(self, t: b.Expr, t_local: b.Expr, kb: b.Expr, length: b.Expr) -> None:
        assert self.wide is not None
        self.wide.widen(self.x, t, t_local, kb, length)

    def multiply(self, acc: b.Expr, weight: b.Expr, value: b.Expr) -> b.Expr:
        return b.call("fma", value, weight, acc)

    def values(self, tile: Tile, line: b.Expr, local: b.Expr) -> Callable[[int, int], b.Expr]:
        p = self.p
        if self.wide is not None:
            return self.wide.values(tile, local)

        def value(r: int, unit: int) -> b.Expr:
            word = self.x[tile.x0 + (line * p.x_line + unit // p.lanes) * p.tile + r]
            return b.splat(word) if p.lanes == 1 else b.half_in_all(p.act, word, unit % 2)

        return value

    def rereads(self, unit: int) -> bool:
        # A word read again is free as an operand of the instruction; kept from its first half on it takes a register.
        return self.p.lanes == 2 and unit % 2 == 1 and self.wide is None
