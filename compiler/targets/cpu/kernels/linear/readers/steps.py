"""Weights of 4-bit numbers with steps (`WeightFormat.steps`): sums of integers over all of K, in any order.

A group of numbers has one byte per column, step + 16 zero. times · number + plus converts its numbers to bytes (number
− zero) · step + 128.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

from tvm.script.ir_builder import tirx as T

from llmc.compiler.targets.cpu.kernels import builder as b
from llmc.compiler.targets.cpu.kernels.ir import int8
from llmc.compiler.targets.cpu.kernels.linear.micro.base import U8X4, MicroKernel
from llmc.compiler.targets.cpu.kernels.linear.places import Tile
from llmc.compiler.targets.cpu.kernels.linear.problem import TURN
from llmc.compiler.targets.cpu.kernels.linear.readers.base import Lines, OfGroup
from llmc.compiler.targets.cpu.kernels.linear.readers.nibbles import FourBits
from llmc.compiler.targets.cpu.target import Target

_ROWS_OF_NUMBERS = 2  # rows whose numbers are multiplied directly; with more rows, converting to bytes first pays
_ONES = 0x01010101


class Stepped(FourBits):
    units_of: ClassVar = {U8X4: 2}
    by_group = True
    unpacked_for_few = True

    @staticmethod
    def helpers(target: Target) -> str:
        return int8.steps()

    def bind(self, k: b.Kernel) -> None:
        super().bind(k)
        # times and plus, per vector of columns; beside sums there is no room for them in registers.
        self._steps = b.Scratch(2 * self.p.columns, "int32")
        self.fetch_group = lambda panel, group: b.do("prefetch", b.at(self.bytes_of_group, self._at(panel, group)))

    def _at(self, panel: b.Expr, group: b.Expr, v: int = 0) -> b.Expr:
        return self.place(panel, self.p.number_groups, group, v)

    def group_of(self, panels: Sequence[b.Expr], group: b.Expr) -> OfGroup:
        (panel,) = panels
        for v in range(self.p.vectors):
            at = b.at(self.bytes_of_group, self._at(panel, group, v))
            self._steps.store(T.call_extern("int32x16", "llmc_step_times", at), 2 * v * b.WIDTH)
            self._steps.store(T.call_extern("int32x16", "llmc_step_plus", at), (2 * v + 1) * b.WIDTH)
        return range(self.p.vectors)

    def operand_of(self, word: b.Expr, unit: int, of_group: OfGroup | None, v: int) -> b.Expr:
        times, plus = (self._steps.vector((2 * v + i) * b.WIDTH) for i in (0, 1))
        return T.call_extern("int32x16", "llmc_stepped", self.bytes_of(word, unit), times, plus)

    def step_and_zero(self, panel: b.Expr, group: b.Expr, v: int) -> tuple[b.Expr, b.Expr]:
        """(step, zero) of a group of 16 columns, as int32."""
        both = T.Cast("int32x16", self.bytes_of_group[T.ramp(self._at(panel, group, v), 1, b.WIDTH)])
        low, high = T.broadcast(T.int32(15), b.WIDTH), T.broadcast(T.int32(4), b.WIDTH)
        return T.bitwise_and(both, low), T.shift_right(both, high)

    def lines(self, micro: MicroKernel) -> Lines:
        return SteppedLines(self, micro)


class SteppedLines:
    """Multiplies packed lines by few rows, group by group."""

    def __init__(self, reader: Stepped, micro: MicroKernel) -> None:
        self.reader, self.micro, self.p = reader, micro, reader.p
        self.by_numbers = self.p.tile <= _ROWS_OF_NUMBERS

    def start(self, tile: Tile, acc: b.Vectors) -> None:
        """The sums before the first line."""
        vectors = self._vectors_of(tile)
        for i, r in enumerate(tile.rows):
            for v in range(vectors):
                zero = T.broadcast(T.int32(0), b.WIDTH)
                acc[i * vectors + v] = zero if self.by_numbers else self.micro.start(tile.x0, r, T.int32(0))

    def add(self, tile: Tile, acc: b.Vectors, line0: b.Expr, line1: b.Expr) -> None:
        """Adds lines [line0, line1) to `acc`; with several groups, line0 begins one."""
        lines = self.p.number_group_lines
        of_group = self._numbers if self.by_numbers else self._bytes
        with T.serial(T.truncdiv(line0, lines), T.truncdiv(line1 + (lines - 1), lines)) as g:
            group = b.let(g)
            first = b.let(T.max(group * lines, line0))
            if tile.fetch.at_group is not None:
                tile.fetch.at_group(group)
            of_group(tile, acc, group, first, b.let(T.min((group + 1) * lines, line1)))

    def _numbers(self, tile: Tile, acc: b.Vectors, group: b.Expr, first: b.Expr, last: b.Expr) -> None:
        """Σ (number − zero) · x · step, computed as step · (Σ number · x − zero · Σ x)."""
        reader, micro, rows, vectors = self.reader, self.micro, len(tile.rows), self._vectors_of(tile)
        sums, ones = b.Vectors(rows * (vectors + 1), "int32"), T.broadcast(T.int32(_ONES), b.WIDTH)
        for i in range(rows * (vectors + 1)):
            sums[i] = T.broadcast(T.int32(0), b.WIDTH)

        def line_of(line: b.Expr) -> None:
            # The line's activations stay in registers rather than its weights: there are fewer.
            values, value = b.Vectors(2 * rows, "int32"), micro.values(tile, line, line)
            for i, r in enumerate(tile.rows):
                for half in range(2):
                    values[2 * i + half] = value(r, half)
                    total = rows * vectors + i
                    sums[total] = micro.multiply(sums[total], ones, values[2 * i + half])
            for v in range(vectors):
                if tile.fetch.at_line is not None:
                    tile.fetch.at_line(line, v)
                word = reader.word(tile.panels[v // self.p.vectors], line, v % self.p.vectors, 0)
                for half in range(2):
                    numbers = b.kept(reader.bytes_of(word, half), "int32")
                    for i in range(rows):
                        at = i * vectors + v
                        sums[at] = micro.multiply(sums[at], numbers, values[2 * i + half])

        self._each_line(first, last, line_of, at_once=TURN)
        for v in range(vectors):
            step, zero = b.Vectors(1, "int32"), b.Vectors(1, "int32")
            step[0], zero[0] = reader.step_and_zero(tile.panels[v // self.p.vectors], group, v % self.p.vectors)
            for i in range(rows):
                at = i * vectors + v
                acc[at] = acc[at] + step[0] * (sums[at] - zero[0] * sums[rows * vectors + i])

    def _bytes(self, tile: Tile, acc: b.Vectors, group: b.Expr, first: b.Expr, last: b.Expr) -> None:
        """Processes the low halves of all lines of one panel, then the high ones: registers have no room for more
        weights beside the sums."""
        reader, (panel,), vectors = self.reader, tile.panels, self.p.vectors
        of_group = reader.group_of(tile.panels, group)
        for half in range(2):

            def line_of(line: b.Expr, half: int = half) -> None:
                # Otherwise LLVM keeps steps in registers.
                b.do("forget_memory", b.at(reader.w, 0))
                weights, value = b.Vectors(vectors, "int32"), self.micro.values(tile, line, line)
                for v in range(vectors):
                    weights[v] = reader.operand_of(reader.word(panel, line, v, 0), half, of_group, v)
                    if v % 2 == half and tile.fetch.at_line is not None:
                        tile.fetch.at_line(line, v)
                for i, r in enumerate(tile.rows):
                    for v in range(vectors):
                        acc[i * vectors + v] = self.micro.multiply(acc[i * vectors + v], weights[v], value(r, half))

            self._each_line(first, last, line_of, at_once=1)

    def _vectors_of(self, tile: Tile) -> int:
        return len(tile.panels) * self.p.vectors

    def _each_line(self, first: b.Expr, last: b.Expr, line_of: Callable[[b.Expr], None], at_once: int) -> None:
        """Lines [first, last) of a group. If every group is whole, the loop has a small constant trip count, whose end
        the CPU predicts."""
        p = self.p
        if p.number_groups > 1 and p.lines % p.number_group_lines == 0:
            with T.serial(p.number_group_lines // at_once) as turn:
                for i in range(at_once):
                    line_of(b.let(first + (turn * at_once + i)))
        else:
            with T.serial(first, last) as line:
                line_of(b.let(line))
