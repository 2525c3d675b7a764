"""paged_attention: a group computes some heads of a token that share keys, and of a split context one partition.

Bits depend only on the token's position, not on the graph (`softmax.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from llmc.compiler.kernel_spec import KernelSpec
from llmc.compiler.targets.gpu.attention_split import rows_together
from llmc.compiler.targets.gpu.kernels.groups import Shared, spread
from llmc.compiler.targets.gpu.kernels.linear import fma
from llmc.compiler.targets.gpu.kernels.softmax import Keys, attend
from llmc.compiler.targets.reference.kernels.attention import Attention
from llmc.compiler.targets.reference.kernels.frame import BLOCK_TABLE_STRIDE, Cell, Expr, Frame, let


class _PagedKeys(Keys):
    def __init__(self, k: Frame, a: Attention, rows: int) -> None:
        self._k, self._a, self._rows = k, a, range(rows)
        self.sink = self._sink if a.sinks else None
        self._stride, self._query = k.scalar(BLOCK_TABLE_STRIDE), Shared(rows * a.head_dim)

    def begin(self, token: Expr, head: Expr) -> tuple[Expr, Expr]:
        self._a.begin(self._k, token, head, self._stride)
        return self._a.first, self._a.last

    def load(self) -> None:
        a, dim = self._a, self._a.head_dim
        source = let((a.token * a.heads + a.head) * dim)
        with spread(self._k, len(self._rows) * dim) as i:
            self._query[i] = self._k.raw("q", source + i)

    def scores(self, position: Expr) -> Sequence[Expr]:
        return self._a.scores(position, self._products)

    def _products(self, key: Expr) -> Sequence[Expr]:
        k, a, dim = self._k, self._a, self._a.head_dim
        totals = [Cell(T.float32(0.0)) for _ in self._rows]
        with T.serial(dim) as i:
            number = let(a.keys.number(k, key + i), "float32")
            for row, total in enumerate(totals):
                total.set(fma(self._query[row * dim + i], number, total.get()))
        return [total.get() for total in totals]

    def scale(self, position: Expr) -> Expr:
        return self._a.values.scale(self._k, *self._a.place_of(position))

    def numbers(self, position: Expr) -> Callable[[Expr], Expr]:
        value = self._a.values.row(*self._a.place_of(position))
        return lambda element: self._a.values.number(self._k, value + element)

    def put(self, row: int, element: Expr, value: Expr) -> None:
        self._a.write(row, element, value)

    def _sink(self, row: Expr) -> Expr:
        return self._k.raw("sinks", self._a.head + row)


def paged_attention(spec: KernelSpec) -> tirx.PrimFunc:
    a = Attention(spec)
    rows = rows_together(a.heads, a.kv_heads, a.head_dim)
    with Frame(spec.symbol(), a.buffers()) as k:
        attend(k, _PagedKeys(k, a, rows), a.heads, rows, a.head_dim, a.segments)
    return k.function()
