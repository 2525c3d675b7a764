"""Numbers of the weight times bf16 activations, two products per lane, where a fast instruction exists. Numbers of at
most eight significant bits are exact in bf16, and their products are exact in float32."""

from __future__ import annotations

from collections.abc import Callable

from llmc.compiler.targets.cpu.kernels import builder as b
from llmc.compiler.targets.cpu.kernels.ir import bf16
from llmc.compiler.targets.cpu.kernels.linear.micro.base import B16X2, BlockMicroKernel
from llmc.compiler.targets.cpu.kernels.linear.paired_rows import PairedRows
from llmc.compiler.targets.cpu.kernels.linear.places import Tile, Walk
from llmc.compiler.targets.cpu.kernels.linear.problem import Problem


class DotNumbers(BlockMicroKernel):
    """rows: converted activations, if they are on the stack already."""

    operand = B16X2

    def __init__(self, p: Problem, rows: PairedRows | None = None) -> None:
        super().__init__(p)
        self._rows = rows

    @staticmethod
    def suits(p: Problem) -> bool:
        return p.paired

    @property
    def rows(self) -> PairedRows:
        assert self._rows is not None
        return self._rows

    def helpers(self) -> str:
        return bf16.dot() + bf16.pairs_of_rows(self.p.tile) + bf16.looked_up_pairs() + bf16.pair_of_floats()

    def hold(self, tiles: int, middle: int, blocks: tuple[int, Walk] | None) -> None:
        whole = Walk(self.p.lines, 1)
        memory = b.Scratch(max(PairedRows.words(self.p, *held) for held in ((tiles, whole), blocks) if held), "int32")
        self._rows = PairedRows(self.p, self.x, tiles, whole, memory)

    def prepare(self, tile0: b.Expr, tiles: b.Expr) -> None:
        self.rows.make_all(tile0, tiles)

    def in_blocks(self, k: b.Kernel, tiles: int, walk: Walk) -> DotNumbers:
        micro = DotNumbers(self.p, PairedRows(self.p, k["x"], tiles, walk, self.rows.memory))
        micro.bind(k)
        return micro

    def prepare_block(self, t: b.Expr, t_local: b.Expr, kb: b.Expr, length: b.Expr) -> None:
        self.rows.make(t, t_local, kb)

    def start_of(self, t: b.Expr, t_local: b.Expr) -> b.Expr:
        return t_local * self.rows.tile_words

    def multiply(self, acc: b.Expr, weight: b.Expr, value: b.Expr) -> b.Expr:
        return b.call("dot_bf16", acc, value, weight)

    def values(self, tile: Tile, line: b.Expr, local: b.Expr) -> Callable[[int, int], b.Expr]:
        first = self.rows.line(tile.x0, line, local)
        return lambda r, unit: b.splat(self.rows.word(first, unit, r))

    def as_float(self, value: b.Expr, zero: b.Expr | None, x0: b.Expr, r: b.Expr, group: b.Expr) -> b.Expr:
        return value if zero is None else b.call("fma", self.sum_of_row(x0, r, group), zero, value)

    def sum_of_row(self, x0: b.Expr, r: b.Expr, group: b.Expr) -> b.Expr:
        return b.splat(self.rows.negated_sum(x0, r, group))
