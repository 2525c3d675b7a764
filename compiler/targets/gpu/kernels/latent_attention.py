"""latent_attention: as `attention.py`, of heads that share one key a token, whose leading elements are its value."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from llmc.compiler.kernel_spec import KernelSpec
from llmc.compiler.targets.gpu.attention_split import rows_together, tokens_together
from llmc.compiler.targets.gpu.kernels.attend import attend
from llmc.compiler.targets.gpu.kernels.linear import fma
from llmc.compiler.targets.gpu.kernels.partition import Keys
from llmc.compiler.targets.gpu.kernels.queries import Queries
from llmc.compiler.targets.gpu.kernels.runs import Run
from llmc.compiler.targets.gpu.kernels.wide import WideRows, neighbouring_rows
from llmc.compiler.targets.reference.kernels.frame import BLOCK_TABLE_STRIDE, Expr, Frame, let
from llmc.compiler.targets.reference.kernels.kv_pools import Pool, key_pool


class _LatentKeys(Keys):
    """together: heads of a group. tokens: of a run, at most."""

    def __init__(self, k: Frame, spec: KernelSpec, pool: Pool, together: int, tokens: int) -> None:
        p = spec.as_dict()
        self._k, self._pool, self._together = k, pool, together
        self._heads, self._rank = int(p["num_heads"]), int(p["rank"])
        self._block, self._scale = int(p["block_size"]), float(p["scale"])
        self.scaled, self._stride = pool.largest is not None, k.scalar(BLOCK_TABLE_STRIDE)
        parts = ("q", 0, self._rank), ("q_rotated", self._rank, int(p["head_dim"]) - self._rank)
        self._parts = [
            (begin, Queries(k, name, self._heads, together, tokens, width), WideRows(k, pool, width, begin))
            for name, begin, width in parts
        ]

    def seen(self, token: Expr) -> tuple[Expr, Expr]:
        return T.int32(0), let(self._k.raw("positions", token))

    def begin(self, run: Run, head: Expr) -> None:
        self._run, self._head = run, head
        self._table = let(self._k.raw("token_seq", run.token) * self._stride)

    def load(self) -> None:
        for _, queries, _ in self._parts:
            queries.load(self._run, self._head)

    def _place_of(self, position: Expr) -> tuple[Expr, Expr, Expr]:
        kv_block = let(self._k.raw("block_tables", self._table + T.truncdiv(position, self._block)))
        return kv_block, T.int32(0), let(T.truncmod(position, self._block))

    def products(self, positions: Sequence[Expr]) -> list[list[Expr]]:
        places = [self._place_of(position) for position in positions]
        keys = [self._pool.row(*place) for place in places]
        scores: list[list[Expr]] = [[T.float32(0.0)] * (self._together * self._run.most) for _ in positions]
        for part, (begin, queries, wide) in enumerate(self._parts):
            products = queries.products(self._run, wide, [let(key + begin) for key in keys])
            factors = [let(self._pool.scale(self._k, *place, part), "float32") for place in places]
            scores = [
                [let(fma(product, factor, score), "float32") for product, score in zip(of_key, earlier, strict=True)]
                for of_key, factor, earlier in zip(products, factors, scores, strict=True)
            ]
        return [[score * T.float32(self._scale) for score in of_key] for of_key in scores]

    def scale(self, position: Expr) -> Expr:
        return self._pool.scale(self._k, *self._place_of(position))

    def values(self, position: Expr, count: int) -> Callable[[Expr], list[Expr]]:
        rows = neighbouring_rows(self._pool, self._place_of, position, count)
        return lambda element: [self._pool.number(self._k, row + element) for row in rows]

    def put(self, row: int, element: Expr, value: Expr) -> None:
        token, head = let(self._run.token + row // self._together), let(self._head + row % self._together)
        self._k.store("out", value, let((token * self._heads + head) * self._rank + element))


def latent_attention(spec: KernelSpec) -> tirx.PrimFunc:
    p = spec.as_dict()
    heads, rank, segments = int(p["num_heads"]), int(p["rank"]), int(p["segments"])
    pool = key_pool(str(p["kv_dtype"]), 1, int(p["head_dim"]), int(p["block_size"]), int(p["key_scales"]))
    inputs = {"q": "f32", "q_rotated": "f32", "block_tables": "i32", "token_seq": "i32", "positions": "i32"}
    partials = {"partials": "f32"} if segments else {}
    together = rows_together(heads, 1, rank)
    tokens = tokens_together(heads, 1, rank) if p.get("runs") else 1
    with Frame(spec.symbol(), {**inputs, "k_pool": pool.buffer_dtype, **partials, "out": "f32"}) as k:
        attend(k, _LatentKeys(k, spec, pool, together, tokens), heads, together, tokens, rank, segments)
    return k.function()
