"""Floats: fused multiply-add, in every instruction set. Activations are float32, or 16-bit and converted to it."""

from __future__ import annotations

from collections.abc import Callable

from tvm.script.ir_builder import tirx as T

from llmc.compiler.targets.cpu.kernels import builder as b
from llmc.compiler.targets.cpu.kernels.linear.micro.base import F32, BlockMicroKernel
from llmc.compiler.targets.cpu.kernels.linear.places import Tile, Walk
from llmc.compiler.targets.cpu.kernels.linear.problem import Problem
from llmc.compiler.targets.cpu.kernels.linear.widened import WideRows


class Fma(BlockMicroKernel):
    """wide: 16-bit activations that were converted to float32 once for all panels; None: each panel converts them."""

    operand = F32

    def __init__(self, p: Problem, wide: WideRows | None = None) -> None:
        super().__init__(p)
        self.wide = wide

    @staticmethod
    def suits(p: Problem) -> bool:
        return not p.integer

    def hold(self, tiles: int, middle: int, blocks: tuple[int, Walk] | None) -> None:
        whole = (tiles, Walk(self.p.lines, 1)) if tiles else None
        sizes = [WideRows.elements(self.p, *held) for held in (whole, blocks) if held]
        if sizes:
            self._memory = T.alloc_buffer((max(sizes),), "float32", scope="local")
        if whole:
            self.wide = WideRows(self.p, *whole, self._memory)

    def prepare(self, tile0: b.Expr, tiles: b.Expr) -> None:
        if self.wide is not None:
            with T.serial(tiles) as t:
                self.wide.widen(self.x, b.let(tile0 + t), b.let(t), T.int32(0), T.int32(self.p.lines))

    def in_blocks(self, k: b.Kernel, tiles: int, walk: Walk) -> Fma:
        micro = Fma(self.p, WideRows(self.p, tiles, walk, self._memory))
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
            return self.wide.values(tile, line, local)

        def value(r: int, unit: int) -> b.Expr:
            word = self.x[tile.x0 + (line * p.x_line + unit // p.lanes) * p.tile + r]
            return b.splat(word) if p.lanes == 1 else b.half_in_all(p.act, word, unit % 2)

        return value

    def rereads(self, unit: int) -> bool:
        # A word read again is free as an operand of the instruction; kept from its first half on it takes a register.
        return self.p.lanes == 2 and unit % 2 == 1 and self.wide is None
