"""16-bit activations converted to float32, once for all panels, where no instruction multiplies them."""

from __future__ import annotations

from collections.abc import Callable

from tvm.script.ir_builder import tirx as T

from llmc.compiler.targets.cpu.kernels import builder as b
from llmc.compiler.targets.cpu.kernels.linear.places import Tile, Walk
from llmc.compiler.targets.cpu.kernels.linear.problem import Problem


class WideRows:
    """`tiles` row tiles on the stack, whole or a block of K at a time: [row tile][half of a word][words][rows].

    walk: of the rows, one block if they are whole. memory: at least `elements` elements; others may use it before and
    after.
    """

    @staticmethod
    def elements(p: Problem, tiles: int, walk: Walk) -> int:
        """float32 elements on the stack for `tiles` row tiles."""
        return tiles * 2 * walk.lines * p.x_line * p.tile

    def __init__(self, p: Problem, tiles: int, walk: Walk, memory: b.Expr) -> None:
        self._p, self._words, self._whole, self._memory = p, walk.lines * p.x_line, walk.count == 1, memory

    def widen(self, x: b.Expr, t: b.Expr, t_local: b.Expr, kb: b.Expr, length: b.Expr) -> None:
        """Converts block kb, of `length` lines, of row tile t: first all low halves, then all high ones."""
        p, words = self._p, self._words
        source = b.let((t * p.x_words + kb * words) * p.tile)
        low = self._low(t_local, 0)
        here = b.let(T.min(p.x_words - kb * words, words) * p.tile) if p.quantized else length * p.tile
        self._widen_words(x, source, here, low, self._high(t_local, 0, low))

    def _low(self, t_local: b.Expr, word: b.Expr) -> b.Expr:
        """Start of a word of a row tile among the low halves."""
        return self._p.let((t_local * 2 * self._words + word) * self._p.tile)

    def _high(self, t_local: b.Expr, word: b.Expr, low: b.Expr) -> b.Expr:
        """Start of a word of a row tile among the high halves."""
        p, words = self._p, self._words
        return b.let(low + words * p.tile) if p.quantized else ((t_local * 2 + 1) * words + word) * p.tile

    def _widen_words(self, x: b.Expr, source: b.Expr, count: b.Expr, low: b.Expr, high: b.Expr) -> None:
        """Converts `count` words of x from `source` on: low halves to `low` and on, high halves to `high` and on."""
        wide, vectors = self._memory, b.let(T.truncdiv(count, b.WIDTH))
        with T.serial(vectors) as i:
            read = x[T.ramp(source + i * b.WIDTH, 1, b.WIDTH)]
            for half, start in enumerate((low, high)):
                b.store(wide, b.halves_of(self._p.act, read, half), T.ramp(start + i * b.WIDTH, 1, b.WIDTH))
        with T.serial(vectors * b.WIDTH, count) as i:
            value = x[source + i]
            for half, start in enumerate((low, high)):
                b.store(wide, b.half_of(self._p.act, value, half), start + i)

    def values(self, tile: Tile, line: b.Expr, local: b.Expr) -> Callable[[int, int], b.Expr]:
        """As `MicroKernel.values`."""
        p = self._p
        word = (line if self._whole else local) * p.x_line
        low = self._low(tile.t_local, word)
        halves = low, self._high(tile.t_local, word, low)
        return lambda r, unit: b.splat(self._memory[halves[unit % 2] + (unit // 2 * p.tile + r)])
