"""latent_attention: as `attention.py`, of heads that share one key a token, whose leading elements are its value."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from llmc.compiler.kernel_spec import KernelSpec
from llmc.compiler.targets.gpu.attention_split import rows_together, tokens_together
from llmc.compiler.targets.gpu.kernels.attend import attend
from llmc.compiler.targets.gpu.kernels.fma import fma
from llmc.compiler.targets.gpu.kernels.partition import Keys
from llmc.compiler.targets.gpu.kernels.queries import Queries
from llmc.compiler.targets.gpu.kernels.runs import Run
from llmc.compiler.targets.gpu.kernels.wide import WideRows, neighbouring_rows
from llmc.compiler.targets.reference.kernels.frame import BLOCK_TABLE_STRIDE, Expr, Frame, let
from llmc.compiler.targets.reference.kernels.kv_pools import key_pool


class Latent:
    """Where heads find the keys that they share; their values are in the same pool."""

    shapes = sinks = False

    def __init__(self, spec: KernelSpec) -> None:
        p = spec.as_dict()
        self.heads, self.rank, self.width = int(p["num_heads"]), int(p["rank"]), int(p["head_dim"])
        self.segments, self._block = int(p["segments"]), int(p["block_size"])
        self.keys = self.values = key_pool(str(p["kv_dtype"]), 1, self.width, self._block, int(p["key_scales"]))

    def buffers(self) -> dict[str, str]:
        inputs = {"q": "f32", "q_rotated": "f32", "block_tables": "i32", "token_seq": "i32", "positions": "i32"}
        partials = {"partials": "f32"} if self.segments else {}
        return {**inputs, "k_pool": self.keys.buffer_dtype, **partials, "out": "f32"}

    def begin(self, k: Frame, token: Expr, head: Expr, stride: Expr) -> None:
        """Starts a unit. head: its first one. stride: of the block tables."""
        self._k, self.head = k, head
        self._table = let(k.raw("token_seq", token) * stride)

    def place_of(self, position: Expr) -> tuple[Expr, Expr, Expr]:
        """(block, head, position in the block) of a token position."""
        kv_block = let(self._k.raw("block_tables", self._table + T.truncdiv(position, self._block)))
        return kv_block, T.int32(0), let(T.truncmod(position, self._block))

    def score(self, value: Expr, head: Expr, last: Expr, position: Expr) -> Expr:
        return value

    def write(self, token: Expr, head: Expr, element: Expr, value: Expr) -> None:
        self._k.store("out", value, let((token * self.heads + head) * self.rank + element))


class _LatentKeys(Keys):
    """together: heads of a group. tokens: of a run, at most."""

    def __init__(self, k: Frame, a: Latent, scale: float, together: int, tokens: int) -> None:
        self._k, self._a, self._scale, self._together = k, a, scale, together
        self.scaled, self._stride = a.keys.largest is not None, k.scalar(BLOCK_TABLE_STRIDE)
        parts = ("q", 0, a.rank), ("q_rotated", a.rank, a.width - a.rank)
        self._parts = [
            (begin, Queries(k, name, a.heads, together, tokens, width), WideRows(k, a.keys, width, begin))
            for name, begin, width in parts
        ]

    def seen(self, token: Expr) -> tuple[Expr, Expr]:
        return T.int32(0), let(self._k.raw("positions", token))

    def begin(self, run: Run, head: Expr) -> None:
        self._run = run
        self._a.begin(self._k, run.token, head, self._stride)

    def load(self) -> None:
        for _, queries, _ in self._parts:
            queries.load(self._run, self._a.head)

    def products(self, positions: Sequence[Expr]) -> list[list[Expr]]:
        places = [self._a.place_of(position) for position in positions]
        keys = [self._a.keys.row(*place) for place in places]
        scores: list[list[Expr]] = [[T.float32(0.0)] * (self._together * self._run.most) for _ in positions]
        for part, (begin, queries, wide) in enumerate(self._parts):
            products = queries.products(self._run, wide, [let(key + begin) for key in keys])
            factors = [let(self._a.keys.scale(self._k, *place, part), "float32") for place in places]
            scores = [
                [let(fma(product, factor, score), "float32") for product, score in zip(of_key, earlier, strict=True)]
                for of_key, factor, earlier in zip(products, factors, scores, strict=True)
            ]
        return [[score * T.float32(self._scale) for score in of_key] for of_key in scores]

    def scale(self, position: Expr) -> Expr:
        return self._a.keys.scale(self._k, *self._a.place_of(position))

    def values(self, position: Expr, count: int) -> Callable[[Expr], list[Expr]]:
        pool = self._a.keys
        rows = neighbouring_rows(pool, self._a.place_of, position, count)
        return lambda element: [pool.number(self._k, row + element) for row in rows]

    def put(self, row: int, element: Expr, value: Expr) -> None:
        token, head = let(self._run.token + row // self._together), let(self._a.head + row % self._together)
        self._a.write(token, head, element, value)


def latent_attention(spec: KernelSpec) -> tirx.PrimFunc:
    a, p = Latent(spec), spec.as_dict()
    together = rows_together(a.heads, 1, a.rank)
    tokens = tokens_together(a.heads, 1, a.rank) if p.get("runs") else 1
    with Frame(spec.symbol(), a.buffers()) as k:
        keys = _LatentKeys(k, a, float(p["scale"]), together, tokens)
        attend(k, keys, a.heads, together, tokens, a.rank, a.segments)
    return k.function()
