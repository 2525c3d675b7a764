"""latent_attention: as `attention.py`, of heads that share one key a token, whose leading elements are its value."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from llmc.compiler.kernel_spec import KernelSpec
from llmc.compiler.targets.gpu.attention_split import rows_together
from llmc.compiler.targets.gpu.kernels.groups import Shared, spread
from llmc.compiler.targets.gpu.kernels.linear import fma
from llmc.compiler.targets.gpu.kernels.softmax import Keys, attend
from llmc.compiler.targets.reference.kernels.frame import BLOCK_TABLE_STRIDE, Cell, Expr, Frame, let
from llmc.compiler.targets.reference.kernels.kv_pools import key_pool


class _LatentKeys(Keys):
    def __init__(self, k: Frame, spec: KernelSpec, rows: int) -> None:
        p = spec.as_dict()
        self._k, self._rows, self._heads, self._rank = k, range(rows), int(p["num_heads"]), int(p["rank"])
        self._block, width = int(p["block_size"]), int(p["head_dim"])
        self._rotated, self._scale = width - self._rank, float(p["scale"])
        self._keys = key_pool(str(p["kv_dtype"]), 1, width, self._block, int(p["key_scales"]))
        self._stride = k.scalar(BLOCK_TABLE_STRIDE)
        self._query, self._turned = Shared(rows * self._rank), Shared(rows * self._rotated)

    def begin(self, token: Expr, head: Expr) -> tuple[Expr, Expr]:
        self._unit = let(token * self._heads + head)
        self._table = let(self._k.raw("token_seq", token) * self._stride)
        return T.int32(0), let(self._k.raw("positions", token))

    def load(self) -> None:
        for name, to, width in (("q", self._query, self._rank), ("q_rotated", self._turned, self._rotated)):
            source = let(self._unit * width)
            with spread(self._k, len(self._rows) * width) as i:
                to[i] = self._k.raw(name, source + i)

    def _place_of(self, position: Expr) -> tuple[Expr, Expr, Expr]:
        kv_block = let(self._k.raw("block_tables", self._table + T.truncdiv(position, self._block)))
        return kv_block, T.int32(0), let(T.truncmod(position, self._block))

    def scores(self, position: Expr) -> Sequence[Expr]:
        place = self._place_of(position)
        key, scores = self._keys.row(*place), [T.float32(0.0) for _ in self._rows]
        parts = (self._query, 0, self._rank), (self._turned, self._rank, self._rotated)
        for part, (of, begin, width) in enumerate(parts):
            totals = [Cell(T.float32(0.0)) for _ in self._rows]
            with T.serial(width) as i:
                number = let(self._keys.number(self._k, key + (begin + i)), "float32")
                for row, total in enumerate(totals):
                    total.set(fma(of[row * width + i], number, total.get()))
            factor = let(self._keys.scale(self._k, *place, part), "float32")
            scores = [
                let(fma(total.get(), factor, score), "float32") for total, score in zip(totals, scores, strict=True)
            ]
        return [let(score * T.float32(self._scale), "float32") for score in scores]

    def scale(self, position: Expr) -> Expr:
        return self._keys.scale(self._k, *self._place_of(position))

    def numbers(self, position: Expr) -> Callable[[Expr], Expr]:
        value = self._keys.row(*self._place_of(position))
        return lambda element: self._keys.number(self._k, value + element)

    def put(self, row: int, element: Expr, value: Expr) -> None:
        self._k.store("out", value, let((self._unit + row) * self._rank + element))


def latent_attention(spec: KernelSpec) -> tirx.PrimFunc:
    p = spec.as_dict()
    heads, rank, segments = int(p["num_heads"]), int(p["rank"]), int(p["segments"])
    keys = key_pool(str(p["kv_dtype"]), 1, int(p["head_dim"]), int(p["block_size"]), int(p["key_scales"]))
    inputs = {"q": "f32", "q_rotated": "f32", "block_tables": "i32", "token_seq": "i32", "positions": "i32"}
    partials = {"partials": "f32"} if segments else {}
    rows = rows_together(heads, 1, rank)
    with Frame(spec.symbol(), {**inputs, "k_pool": keys.buffer_dtype, **partials, "out": "f32"}) as k:
        attend(k, _LatentKeys(k, spec, rows), heads, rows, rank, segments)
    return k.function()
