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
from llmc.compiler.targets.gpu.kernels.groups import calling, sync_written, turns, unrolled
from llmc.compiler.targets.gpu.kernels.kv_write import Writer, numbers_of
from llmc.compiler.targets.gpu.kernels.partition import Keys
from llmc.compiler.targets.gpu.kernels.queries import Queries
from llmc.compiler.targets.gpu.kernels.runs import Run
from llmc.compiler.targets.gpu.kernels.turned import OfGroup, OwnHeads, rotated_buffers
from llmc.compiler.targets.gpu.kernels.wide import WideRows, neighbouring_rows
from llmc.compiler.targets.reference.kernels.attention import Attention, RopeWrite, seen_keys
from llmc.compiler.targets.reference.kernels.frame import BLOCK_TABLE_STRIDE, Expr, Frame, let, when


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


class _RotatedKeys(_PagedKeys):
    """Of a token alone, whose query heads, key and value the group makes of qkv."""

    def __init__(self, k: Frame, spec: KernelSpec, a: Attention, heads: int) -> None:
        super().__init__(k, spec, a, heads, 1)
        rope = RopeWrite(spec)
        sums = rope.qk_norm or rope.norm_rotated
        self._sharing = OfGroup(k, a.head_dim, sums=sums)
        # In loops that are unrolled, PoCL 3.1 misplaces what is guarded.
        guards = a.head_dim % calling(k).items or rope.rotary not in (0, a.head_dim)
        self._one_by_one = bool(sums or guards)
        self._own = OwnHeads(k, rope, self._sharing)
        self._writer = Writer(k, rope.keys) if self._own.writes else None

    def begin(self, run: Run, head: Expr) -> None:
        super().begin(run, head)
        self._own.begin(run.token)

    def write_own(self, start: Expr, end: Expr) -> None:
        if self._writer is None:
            return
        own, elements, kv_head = self._own, self._sharing.elements, self._a.kv_head
        for pool, found, stated in zip(
            (self._a.keys, self._a.values), (own.key(kv_head), own.value(kv_head)), own.scales(kv_head), strict=True
        ):
            number = numbers_of(found)
            widest = self._writer.widest(elements, number)
            with when(own.is_among(start, end)):
                self._writer.write(pool, own.place(kv_head), elements, number, widest, stated)
        sync_written()

    def load(self) -> None:
        elements = self._sharing.elements
        with turns(self._k, T.int32(self._heads)) if self._one_by_one else unrolled(self._heads) as row:
            found = self._own.query(let(self._a.head + row))
            with elements.each() as (place, i):
                self._queries.put(row, i, found[place])


def paged_attention(spec: KernelSpec) -> tirx.PrimFunc:
    a = Attention(spec)
    shape = a.heads, a.kv_heads, a.head_dim
    heads = rows_together(*shape)
    tokens = tokens_together(*shape) if spec.as_dict().get("runs") else 1
    with Frame(spec.symbol(), a.buffers()) as k:
        attend(k, _PagedKeys(k, spec, a, heads, tokens), a.heads, heads, tokens, a.head_dim, a.segments)
    return k.function()


def rotated_attention(spec: KernelSpec) -> tirx.PrimFunc:
    """rope_kv_write and paged_attention of a graph with one row, by their operations.

    The group that computes the token's own partition writes key and value before it reads them. Nobody else reads them
    here: no group shares its KV head, and there is no other token.
    """
    a = Attention(spec)
    heads = rows_together(a.heads, a.kv_heads, a.head_dim)
    with Frame(spec.symbol(), rotated_buffers(spec, a)) as k:
        attend(k, _RotatedKeys(k, spec, a, heads), a.heads, heads, 1, a.head_dim, a.segments)
    return k.function()
