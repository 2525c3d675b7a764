"""bf16 activations as fixed-point numbers, where no instruction multiplies bf16: made once for all panels.

Each group of G columns of a row has one exponent e, that of its largest magnitude. Numbers are s16: value · 2^(14 − e),
rounded to nearest even. So values above 2⁻⁷ of the largest keep every bit. The error of smaller values is at most 2⁻¹⁵
of the largest.
"""

from __future__ import annotations

from tvm.script.ir_builder import tirx as T

from llmc.compiler.targets.cpu.kernels import builder as b
from llmc.compiler.targets.cpu.kernels.linear.problem import Problem
from llmc.compiler.targets.cpu.kernels.linear.row_end import RowEnd

_ONES = 0x00010001


class FixedRows:
    """Row tiles on the stack, at most `tiles`.

    Layout: [row tile][words][rows] pairs of numbers, then per group the scale and the sum times −factor, [scale or
    sum][groups][rows]. The pairs of a line of 8 elements are (0, 2), (1, 3), (4, 6), (5, 7). Elements past the row's
    end are 0.
    """

    def __init__(self, p: Problem, x: b.Expr, tiles: int, factor: int) -> None:
        self._p, self._x, self._factor = p, x, factor
        self.group_words = p.group_lines * p.x_line
        self.step_words = max(b.WIDTH // p.tile, self.group_words)
        """Words of a row that are made at a time: whole vectors and whole groups."""
        self.steps = b.ceil_div(p.x_words, self.step_words)
        self.groups = self.steps * self.step_words // self.group_words
        self.words = self.steps * self.step_words
        self.tile_words = (self.words + 2 * self.groups) * p.tile
        self.memory = T.alloc_buffer((tiles * self.tile_words,), "int32", scope="local")
        self._end = RowEnd(p, x, self.step_words)

    def _scale_at(self, x0: b.Expr, r: b.Expr, group: b.Expr) -> b.Expr:
        return x0 + (self.words + group) * self._p.tile + r

    def _sum_at(self, x0: b.Expr, r: b.Expr, group: b.Expr) -> b.Expr:
        return x0 + (self.words + self.groups + group) * self._p.tile + r

    def scale_of(self, x0: b.Expr, r: b.Expr, group: b.Expr) -> b.Expr:
        """Scale of a group of row r in the row tile at x0."""
        return T.reinterpret("float32", self.memory[self._scale_at(x0, r, group)])

    def sum_of(self, x0: b.Expr, r: b.Expr, group: b.Expr) -> b.Expr:
        """Sum of a group, times −factor."""
        return self.memory[self._sum_at(x0, r, group)]

    def make(self, tile0: b.Expr, tiles: b.Expr) -> None:
        """Converts row tiles [tile0, tile0 + tiles)."""
        p = self._p
        step_lanes, whole = self.step_words * p.tile, p.kdim // p.lanes // self.step_words
        with T.serial(tiles) as t:
            source, x0 = b.let((tile0 + t) * (p.x_words * p.tile)), b.let(t * self.tile_words)
            with T.serial(whole) as step:
                self._step(self._x, b.let(source + step * step_lanes), x0, b.let(step))
            if whole < self.steps:
                self._end.copy(b.let(source + whole * step_lanes), p.x_words - whole * self.step_words)
                self._step(self._end.memory, T.int32(0), x0, b.let(T.int32(whole)))

    def _step(self, x: b.Expr, source: b.Expr, x0: b.Expr, step: b.Expr) -> None:
        p = self._p
        vectors, group_lanes = self.step_words * p.tile // b.WIDTH, self.group_words * p.tile
        bits = [bit for bit in (1, 2, 4, 8) if p.tile <= bit < group_lanes]
        words = b.Vectors(vectors, "int32")
        largest, total, times, scale = b.Vectors(1, "int32"), b.Vectors(1, "int32"), b.Vectors(1), b.Vectors(1)
        largest[0] = total[0] = T.broadcast(T.int32(0), b.WIDTH)
        for v in range(vectors):
            words[v] = x[T.ramp(source + v * b.WIDTH, 1, b.WIDTH)]
            largest[0] = T.call_extern("int32x16", "llmc_fixed_largest", largest[0], words[v])
        for bit in bits:
            largest[0] = T.call_extern("int32x16", f"llmc_largest_{bit}", largest[0])
        times[0], scale[0] = b.call("fixed_times", largest[0]), b.call("fixed_scale", largest[0])
        at = b.let(x0 + step * (vectors * b.WIDTH))
        for v in range(vectors):
            words[v] = T.call_extern("int32x16", f"llmc_fixed_numbers_{p.tile}", words[v], times[0])
            b.store(self.memory, words[v], T.ramp(at + v * b.WIDTH, 1, b.WIDTH))
            ones = T.broadcast(T.int32(_ONES), b.WIDTH)
            total[0] = T.call_extern("int32x16", "llmc_dot_s16", total[0], words[v], ones)
        for bit in bits:
            total[0] = T.call_extern("int32x16", f"llmc_sum_{bit}", total[0])
        of_step = self.step_words // self.group_words
        for group in range(of_step):
            for r in range(p.tile):
                lane, where = group * group_lanes + r, b.let(step * of_step + group)
                b.store(self.memory, T.reinterpret("int32", scale.lane(lane)), self._scale_at(x0, r, where))
                b.store(self.memory, total.lane(lane) * -self._factor, self._sum_at(x0, r, where))
