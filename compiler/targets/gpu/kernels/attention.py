"""paged_attention: a group computes heads of neighbouring tokens that share keys, and of a split context one partition.

Bits depend only on the token's position, not on the graph (`partition.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from llmc.compiler.kernel_spec import KernelSpec
from llmc.compiler.targets.gpu.attention_split import rows_together, tokens_together
from llmc.compiler.targets.gpu.kernels.attend import attend
from llmc.compiler.targets.gpu.kernels.partition import Keys
from llmc.compiler.targets.gpu.kernels.queries import Queries
from llmc.compiler.targets.gpu.kernels.runs import Run
from llmc.compiler.targets.gpu.kernels.wide import WideRows, neighbouring_rows
from llmc.compiler.targets.reference.kernels.attention import Attention, seen_keys
from llmc.compiler.targets.reference.kernels.frame import BLOCK_TABLE_STRIDE, Expr, Frame, let


class _PagedKeys(Keys):
    """heads: of a group. tokens: of a run, at most."""

    def __init__(self, k: Frame, spec: KernelSpec, a: Attention, heads: int, tokens: int) -> None:
        self._k, self._p, self._a, self._heads = k, spec.as_dict(), a, heads
        self.scaled, self.shapes = a.values.largest is not None, a.shapes
        self.sink = self._sink if a.sinks else None
        self._stride = k.scalar(BLOCK_TABLE_STRIDE)
        self._queries = Queries(k, "q", a.heads, heads, tokens, a.head_dim)
        self._wide = WideRows(k, a.keys, a.head_dim)

    def seen(self, token: Expr) -> tuple[Expr, Expr]:
        return seen_keys(self._k, self._p, token)

    def begin(self, run: Run, head: Expr) -> None:
        self._run = run
        self._a.begin(self._k, run.token, head, self._stride)

    def load(self) -> None:
        self._queries.load(self._run, self._a.head)

    def products(self, positions: Sequence[Expr]) -> list[list[Expr]]:
        a = self._a
        rows = [a.keys.row(*a.place_of(position)) for position in positions]
        products = self._queries.products(self._run, self._wide, rows)
        factors = [a.factor(position) for position in positions]
        return [[product * factor for product in of_key] for of_key, factor in zip(products, factors, strict=True)]

    def score(self, row: Expr, position: Expr, product: Expr) -> Expr:
        last = let(self._run.last(T.truncdiv(row, self._heads)))
        return self._a.score(product, let(self._a.head + T.truncmod(row, self._heads)), last, position)

    def scale(self, position: Expr) -> Expr:
        return self._a.values.scale(self._k, *self._a.place_of(position))

    def values(self, position: Expr, count: int) -> Callable[[Expr], list[Expr]]:
        a = self._a
        rows = neighbouring_rows(a.values, a.place_of, position, count)
        return lambda element: [a.values.number(self._k, row + element) for row in rows]

    def put(self, row: int, element: Expr, value: Expr) -> None:
        token = let(self._run.token + row // self._heads)
        self._a.write(token, let(self._a.head + row % self._heads), element, value)

    def _sink(self, row: Expr) -> Expr:
        return self._k.raw("sinks", self._a.head + T.truncmod(row, self._heads))


def paged_attention(spec: KernelSpec) -> tirx.PrimFunc:
    a = Attention(spec)
    shape = a.heads, a.kv_heads, a.head_dim
    heads = rows_together(*shape)
    tokens = tokens_together(*shape) if spec.as_dict().get("runs") else 1
    with Frame(spec.symbol(), a.buffers()) as k:
        attend(k, _PagedKeys(k, spec, a, heads, tokens), a.heads, heads, tokens, a.head_dim, a.segments)
    return k.function()
