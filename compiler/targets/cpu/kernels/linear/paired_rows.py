"""bf16 activations in the pair order of a quantized weight's numbers, copied once for all panels.

They include the sum of each group of a row, for zero points and offsets. Its bits do not depend on the row tile. Up to
32 elements are added as a tree, halves apart first; the trees of a group are added one after the other.
"""

from __future__ import annotations

import math
from contextlib import nullcontext

from tvm.script.ir_builder import tirx as T

from llmc.compiler.targets.cpu.kernels import builder as b
from llmc.compiler.targets.cpu.kernels.linear.places import Walk
from llmc.compiler.targets.cpu.kernels.linear.problem import TURN, Problem
from llmc.compiler.targets.cpu.kernels.linear.row_end import RowEnd

_STEP_WORDS = 16
"""Words made at a time: one vector for each row of the tile."""
_MINUS_ONES = -0x407F4080  # 0xBF80BF80, two bf16


class PairedRows:
    """A block of up to `tiles` row tiles on the stack, [row tile][words][rows]. The pairs of a line of 8 elements are
    (0, 2), (1, 3), (4, 6), (5, 7). Elements past the row's end are 0. memory: at least `words` words; others may use it
    before and after."""

    @staticmethod
    def words(p: Problem, tiles: int, walk: Walk) -> int:
        """Words on the stack for `tiles` row tiles."""
        return tiles * b.ceil_div(walk.lines, TURN) * _STEP_WORDS * p.tile

    def __init__(self, p: Problem, x: b.Expr, tiles: int, walk: Walk, memory: b.Scratch) -> None:
        self._p, self._x, self._blocks = p, x, walk.count
        self._steps = b.ceil_div(walk.lines, TURN)
        self.tile_words = self.words(p, 1, walk)
        self._group_words = p.group_lines * p.x_line
        self._groups = b.ceil_div(walk.lines, p.group_lines)
        self._tree_words = math.gcd(_STEP_WORDS, self._group_words)
        self.memory = memory
        self._sums = T.alloc_buffer((tiles * self._groups * p.tile,), "float32", scope="local") if p.shifted else None
        self._end = RowEnd(p, x, _STEP_WORDS)

    def line(self, x0: b.Expr, line: b.Expr, local: b.Expr) -> b.Expr:
        """Start of a line of the row tile at x0. local: number of the line in the block that is read of the weight,
        which may be shorter than whole rows."""
        return b.let(x0 + (line if self._blocks == 1 else local) * (self._p.x_line * self._p.tile))

    def word(self, first: b.Expr, unit: b.Expr, r: b.Expr) -> b.Expr:
        """A word of row r in the line that starts at `first`."""
        return self.memory.element(first + (unit * self._p.tile + r))

    def negated_sum(self, x0: b.Expr, r: b.Expr, group: b.Expr) -> b.Expr:
        """Negated sum of the activations of a group, as a float."""
        assert self._sums is not None
        return self._sums[self._sum_at(T.truncdiv(x0, self.tile_words), r, self._local(group))]

    def _local(self, group: b.Expr) -> b.Expr:
        """Number of a group within its block."""
        return group if self._blocks == 1 else T.truncmod(group, self._groups)

    def _sum_at(self, t_local: b.Expr, r: b.Expr, group: b.Expr) -> b.Expr:
        return (t_local * self._groups + group) * self._p.tile + r

    def make_all(self, tile0: b.Expr, tiles: b.Expr) -> None:
        """Copies row tiles [tile0, tile0 + tiles), for a walk of one block."""
        with T.serial(tiles) as t:
            self.make(b.let(tile0 + t), b.let(t), T.int32(0))

    def make(self, t: b.Expr, t_local: b.Expr, kb: b.Expr) -> None:
        """Copies block kb of row tile t to place t_local."""
        p, lanes = self._p, _STEP_WORDS * self._p.tile
        whole = p.kdim // p.lanes // _STEP_WORDS
        if self._sums is not None and self._group_words > self._tree_words:
            # A row with a single group continues from block to block.
            with b.when(kb == 0) if p.groups == 1 else nullcontext(), T.serial(self._groups * p.tile) as i:
                b.store(self._sums, T.float32(0), t_local * (self._groups * p.tile) + i)
        first = b.let(kb * self._steps)
        source = b.let(t * p.tile_words + first * lanes)
        with T.serial(b.let(T.min(whole - first, self._steps))) as step:
            self._step(self._x, b.let(source + step * lanes), t_local, b.let(step))
        if whole * _STEP_WORDS < p.x_words:
            with b.when(kb == self._blocks - 1):
                self._end.copy(b.let(t * p.tile_words + whole * lanes), p.x_words - whole * _STEP_WORDS)
                self._step(self._end.memory, T.int32(0), t_local, b.let(whole - first))

    def _step(self, x: b.Expr, source: b.Expr, t_local: b.Expr, step: b.Expr) -> None:
        p = self._p
        at = b.let(t_local * self.tile_words + step * (_STEP_WORDS * p.tile))
        sums = b.Vectors(p.tile)
        for v in range(p.tile):
            words = x[T.ramp(source + v * b.WIDTH, 1, b.WIDTH)]
            pairs = b.kept(T.call_extern("int32x16", f"llmc_pairs_of_rows_{p.tile}", words), "int32")
            self.memory.store(pairs, at + v * b.WIDTH)
            if self._sums is not None:
                ones = T.broadcast(T.int32(_MINUS_ONES), b.WIDTH)
                sums[v] = b.call("dot_bf16", b.splat(0.0), pairs, ones)
        if self._sums is not None:
            self._add(sums, t_local, step)

    def _add(self, sums: b.Vectors, t_local: b.Expr, step: b.Expr) -> None:
        """Adds the sums of a step's pairs to those of their groups. A lane is [word of the step][row]."""
        assert self._sums is not None
        p, lane_bits = self._p, b.WIDTH.bit_length() - 1
        words = self._tree_words
        left, row_bits = list(range(p.tile)), p.tile.bit_length() - 1
        for bit in reversed(range(row_bits, row_bits + words.bit_length() - 1)):
            apart = 1 << (bit - lane_bits) if bit >= lane_bits else 0
            left = [v for v in left if not v & apart]
            for v in left:
                if apart:
                    sums[v] = b.call("add", sums[v], sums[v + apart])
                else:
                    sums[v] = b.call(f"folded_{1 << bit}", sums[v])
        for tree in range(_STEP_WORDS // words):
            group = b.let(T.truncdiv(step * _STEP_WORDS + tree * words, self._group_words))
            # In the last step, groups beyond the row's end.
            with b.when(group < self._groups):
                for r in range(p.tile):
                    at, total = self._sum_at(t_local, r, group), sums.lane(tree * words * p.tile + r)
                    b.store(self._sums, self._sums[at] + total if self._group_words > words else total, at)
