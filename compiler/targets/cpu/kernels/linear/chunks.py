"""Groups row tiles into chunks that share a pass over the panels of a weight, and distributes chunks × panels to
tasks."""

from __future__ import annotations

from tvm.script.ir_builder import tirx as T

from llmc.compiler.targets.cpu.kernels import builder as b


class Chunks:
    """`tiles` row tiles in nearly equal chunks of at most `most`; all are multiples of `unit`, as is `most`.

    count: number of chunks. A unit of work is one chunk times one panel; units are ordered by chunk.
    """

    def __init__(self, k: b.Kernel, tiles: b.Expr, panels: int, most: int, unit: int = 1) -> None:
        self._k, self._tiles, self._panels, self._unit = k, tiles, panels, unit
        self._units = b.let(T.truncdiv(tiles + (unit - 1), unit))
        self.count = b.let(T.truncdiv(tiles + (most - 1), most))

    def span(self, chunk: b.Expr) -> tuple[b.Expr, b.Expr]:
        """(first row tile of a chunk, number of its row tiles)."""
        first = b.let(self._start(chunk))
        return first, b.let(T.min(self._start(chunk + 1), self._tiles) - first)

    def _start(self, chunk: b.Expr) -> b.Expr:
        return T.truncdiv(chunk * self._units, self.count) * self._unit

    def bounds(self) -> tuple[b.Expr, b.Expr]:
        """(first unit of this task, end). Tasks get equal shares of row tiles × panels, whatever the sizes of
        chunks."""
        return self._bound(self._k.task), self._bound(self._k.task_end)

    def _bound(self, task: b.Expr) -> b.Expr:
        share = b.let(T.call_extern("int32", "llmc_share", task, b.let(self._tiles * self._panels), self._k.num_tasks))
        found = T.alloc_buffer((1,), "int32", scope="local")
        b.store(found, T.int32(0), 0)
        with T.serial(self.count) as chunk:
            first, size = self.span(chunk)
            before = b.let(first * self._panels)
            with b.when(before <= share):
                nearest = T.truncdiv(share - before + T.truncdiv(size, 2), size)
                b.store(found, chunk * self._panels + nearest, 0)
        return b.let(found[0])
