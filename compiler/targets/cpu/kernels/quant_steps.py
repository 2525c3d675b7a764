"""Packed lines of a weight with steps (`WeightFormat.steps`) times few rows: sums of integers, in whatever order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from tvm.script.ir_builder import tirx as T

from llmc.compiler.targets.cpu.kernels import builder as b
from llmc.compiler.targets.cpu.kernels.quant_layer import TURN, QuantLayer
from llmc.compiler.targets.cpu.kernels.quant_place import Tile
from llmc.compiler.targets.cpu.kernels.quant_weight import QuantWeight

_ROWS_OF_NUMBERS = 2  # rows whose numbers are multiplied as they are; for more rows it pays to make bytes of them
_ONES = 0x01010101


class Writer(Protocol):
    """What emits register tiles (`quant_tile.TileWriter`)."""

    layer: QuantLayer
    weight: QuantWeight

    def start(self, tile: Tile, acc: b.Vectors, group: b.Expr) -> None:
        """The sums before the first element."""

    def multiply(self, acc: b.Expr, weight: b.Expr, value: b.Expr) -> b.Expr:
        """acc + weight · value."""

    def activation(self, x0: b.Expr, r: int, line: b.Expr, unit: int) -> b.Expr:
        """A word of a line of row r, in every lane."""


class SteppedLines:
    """Emits them in register tiles of `writer`."""

    def __init__(self, writer: Writer) -> None:
        self.writer, self.layer, self.weight = writer, writer.layer, writer.weight
        self.by_numbers = self.layer.tile <= _ROWS_OF_NUMBERS

    def start(self, tile: Tile, acc: b.Vectors) -> None:
        """The sums before the first line."""
        if not self.by_numbers:
            self.writer.start(tile, acc, T.int32(0))
            return
        for i in range(len(tile.rows) * self.vectors_of(tile)):
            acc[i] = T.broadcast(T.int32(0), b.WIDTH)

    def add(self, tile: Tile, acc: b.Vectors, line0: b.Expr, line1: b.Expr) -> None:
        """Adds lines [line0, line1) to `acc`, group by group; if there are several, line0 begins one."""
        lines = self.layer.number_group_lines
        of_group = self.numbers if self.by_numbers else self.bytes
        with T.serial(T.truncdiv(line0, lines), T.truncdiv(line1 + (lines - 1), lines)) as g:
            group = b.let(g)
            first = b.let(T.max(group * lines, line0))
            if tile.fetch.at_group is not None:
                tile.fetch.at_group(group)
            of_group(tile, acc, group, first, b.let(T.min((group + 1) * lines, line1)))

    def numbers(self, tile: Tile, acc: b.Vectors, group: b.Expr, first: b.Expr, last: b.Expr) -> None:
        """Σ (number − zero) · x · step as step · (Σ number · x − zero · Σ x)."""
        writer, weight, rows, vectors = self.writer, self.weight, len(tile.rows), self.vectors_of(tile)
        sums, ones = b.Vectors(rows * (vectors + 1), "int32"), T.broadcast(T.int32(_ONES), b.WIDTH)
        for i in range(rows * (vectors + 1)):
            sums[i] = T.broadcast(T.int32(0), b.WIDTH)

        def line_of(line: b.Expr) -> None:
            # The line's activations stay in registers, not its weights: there are fewer.
            values = b.Vectors(2 * rows, "int32")
            for i, r in enumerate(tile.rows):
                for half in range(2):
                    values[2 * i + half] = writer.activation(tile.x0, r, line, half)
                    total = rows * vectors + i
                    sums[total] = writer.multiply(sums[total], ones, values[2 * i + half])
            for v in range(vectors):
                if tile.fetch.at_line is not None:
                    tile.fetch.at_line(line, v)
                word = weight.word(tile.panels[v // self.layer.vectors], line, v % self.layer.vectors, 0)
                for half in range(2):
                    numbers = b.Vectors(1, "int32")
                    numbers[0] = weight.bytes_of(word, half)
                    for i in range(rows):
                        at = i * vectors + v
                        sums[at] = writer.multiply(sums[at], numbers[0], values[2 * i + half])

        self.each_line(first, last, line_of, at_once=TURN)
        for v in range(vectors):
            step, zero = b.Vectors(1, "int32"), b.Vectors(1, "int32")
            step[0], zero[0] = weight.step_and_zero(tile.panels[v // self.layer.vectors], group, v % self.layer.vectors)
            for i in range(rows):
                at = i * vectors + v
                acc[at] = acc[at] + step[0] * (sums[at] - zero[0] * sums[rows * vectors + i])

    def bytes(self, tile: Tile, acc: b.Vectors, group: b.Expr, first: b.Expr, last: b.Expr) -> None:
        """The low halves of all lines of the one panel, then the high ones: no more weights have place in registers
        beside the sums."""
        weight, (panel,), vectors = self.weight, tile.panels, self.layer.vectors
        steps = weight.steps(panel, group)
        for half in range(2):

            def line_of(line: b.Expr, half: int = half) -> None:
                # Or LLVM keeps steps in registers.
                b.do("forget_memory", b.at(weight.w, 0))
                weights = b.Vectors(vectors, "int32")
                for v in range(vectors):
                    weights[v] = weight.bytes_of(weight.word(panel, line, v, 0), half, steps, v)
                    if v % 2 == half and tile.fetch.at_line is not None:
                        tile.fetch.at_line(line, v)
                for i, r in enumerate(tile.rows):
                    value = self.writer.activation(tile.x0, r, line, half)
                    for v in range(vectors):
                        acc[i * vectors + v] = self.writer.multiply(acc[i * vectors + v], weights[v], value)

            self.each_line(first, last, line_of, at_once=1)

    def vectors_of(self, tile: Tile) -> int:
        return len(tile.panels) * self.layer.vectors

    def each_line(self, first: b.Expr, last: b.Expr, line_of: Callable[[b.Expr], None], at_once: int) -> None:
        """Lines [first, last) of a group. Where every group is whole, they are a known, small number of turns: a loop
        whose end the CPU foresees."""
        layer = self.layer
        if layer.number_groups > 1 and layer.lines % layer.number_group_lines == 0:
            with T.serial(layer.number_group_lines // at_once) as turn:
                for i in range(at_once):
                    line_of(b.let(first + (turn * at_once + i)))
        else:
            with T.serial(first, last) as line:
                line_of(b.let(line))
