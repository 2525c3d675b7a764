"""The end of a row tile of 16-bit activations, when its words do not fill a whole copied step."""

from __future__ import annotations

from tvm.script.ir_builder import tirx as T

from llmc.compiler.targets.cpu.kernels import builder as b
from llmc.compiler.targets.cpu.kernels.linear.problem import Problem


class RowEnd:
    """A step of `words` words of K of a row tile on the stack: the tile's last words, then zeros."""

    def __init__(self, p: Problem, x: b.Expr, words: int) -> None:
        self._p, self._x, self._words = p, x, words
        self.memory = T.alloc_buffer((words * p.tile,), "int32", scope="local")

    def copy(self, source: b.Expr, words: int) -> None:
        """Copies the tile's last `words` words from `source`. The other half of an odd last element's word is not a
        number."""
        p = self._p
        lanes = words * p.tile
        with T.serial(lanes, self._words * p.tile) as i:
            b.store(self.memory, T.int32(0), i)
        odd = lanes - p.tile if p.kdim % p.lanes else lanes
        with T.serial(odd) as i:
            b.store(self.memory, self._x[source + i], i)
        with T.serial(odd, lanes) as i:
            b.store(self.memory, T.bitwise_and(self._x[source + i], T.int32(0xFFFF)), i)
