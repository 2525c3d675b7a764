"""rope_kv_write and latent_kv_write: a group works on a head of a token, and each item has some of its elements.

What norms and scales need of all elements is folded. An item rotates its elements alone, as it reads the other half's.
"""

from __future__ import annotations

from collections.abc import Callable

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from llmc.compiler.kernel_spec import KernelSpec
from llmc.compiler.targets.gpu.kernels.fold import Fold, add, largest
from llmc.compiler.targets.gpu.kernels.groups import calling
from llmc.compiler.targets.gpu.kernels.linear import fma
from llmc.compiler.targets.gpu.kernels.strips import Kept, Strip
from llmc.compiler.targets.reference.kernels.attention import RopeWrite
from llmc.compiler.targets.reference.kernels.frame import NUM_TOKENS, Array, Cell, Expr, Frame, is_nan, let, when
from llmc.compiler.targets.reference.kernels.kv_pools import Pool, key_pool

_Number = Callable[[Expr, Expr], Expr]
"""The number of an element, by its place in the item's strip and its index."""


class _Writer:
    """Writes a position's part of a pool from numbers that the items have."""

    def __init__(self, k: Frame, pool: Pool) -> None:
        """pool: of those that are written, which have one dtype."""
        self._k, self._widest = k, None if pool.largest is None else Fold(k, largest)

    def widest(self, strip: Strip, number: _Number) -> Expr | None:
        """The largest magnitude; None if the pool has floats. Every item of the group calls it."""
        if self._widest is None:
            return None
        found = Cell(T.float32(0.0))
        with strip.each() as (place, i):
            magnitude = let(T.abs(number(place, i)), "float32")
            with when(T.Or(magnitude > found.get(), is_nan(magnitude))):
                found.set(magnitude)
        return self._widest(found.get())

    def write(
        self,
        pool: Pool,
        at: tuple[Expr, Expr, Expr],
        strip: Strip,
        number: _Number,
        widest: Expr | None,
        stated: Expr | None = None,
        part: tuple[int, int] = (0, 0),
    ) -> None:
        """at: KV block, head, position in the block. widest: what `widest` gives. part: (number, first element)
        of the position's part."""
        k, (which, first) = self._k, part
        row = let(pool.row(*at) + first)
        if widest is None:
            with strip.each() as (place, i):
                k.store(pool.name, number(place, i), row + i)
            return
        inverse = pool.inverse(widest)
        with strip.each() as (place, i):
            pool.put(k, row + i, number(place, i), inverse, stated)
        with when(calling(k).item == 0):
            pool.put_scale(k, *at, widest, stated, which)


def _rotated(k: Frame, angle: Expr, half: int, i: Expr, own: Expr, other: Expr) -> Expr:
    """Element i of a rotated vector. other: the element of the other half with which it is rotated."""
    turn = let(T.Select(i < half, i, i - half))
    cos, sin = k.raw("cos_sin", angle + turn), k.raw("cos_sin", angle + half + turn)
    return T.Select(i < half, own * cos - other * sin, own * cos + other * sin)


def _partner(half: int, i: Expr) -> Expr:
    """The index of the element with which element i is rotated."""
    return let(T.Select(i < half, i + half, i - half))


def _factor(folded: Expr, width: int, eps: float) -> Expr:
    """1 / sqrt(mean square). folded: the sum of squares."""
    return let(T.float32(1.0) / T.sqrt(folded / T.float32(width) + T.float32(eps)), "float32")


def rope_kv_write(spec: KernelSpec) -> tirx.PrimFunc:
    rope = RopeWrite(spec)
    norm_first = rope.qk_norm and not rope.norm_rotated
    with Frame(spec.symbol(), rope.buffers) as k:
        strip, squares_of = Strip(k, rope.head_dim), Fold(k, add) if norm_first or rope.norm_rotated else None
        writer = _Writer(k, rope.keys) if rope.kv_heads else None
        with calling(k).share_groups(let(k.scalar(NUM_TOKENS) * rope.all_heads)) as unit:
            token, head = let(T.truncdiv(unit, rope.all_heads)), let(T.truncmod(unit, rope.all_heads))
            source, angle = let(unit * rope.head_dim), let(k.raw("positions", token) * rope.rotary)
            turns, factor = let(T.Cast("int32", head < rope.heads + rope.kv_heads)), Cell(T.float32(1.0))
            given, found = Kept(strip, lambda i: k.raw("qkv", source + i)), Array(strip.places)
            number = _numbers(found)

            def find_factor(number: _Number) -> None:
                assert squares_of is not None
                squares = Cell(T.float32(0.0))
                with strip.each() as (place, i):
                    one = let(number(place, i), "float32")
                    squares.set(fma(one, one, squares.get()))
                factor.set(_factor(squares_of(squares.get()), rope.head_dim, rope.norm_eps))

            def norm(i: Expr) -> Expr:
                of_query = let(k.raw("q_norm", i), "float32")
                return T.Select(head < rope.heads, of_query, let(k.raw("k_norm", i), "float32"))

            def value(number: Expr, i: Expr) -> Expr:
                return let(number * factor.get() * norm(i), "float32") if norm_first else number

            if norm_first:
                find_factor(given.get)
            with strip.each() as (place, i):
                found[place] = given.get(place, i)
                with when(turns == 1):
                    found[place] = value(given.get(place, i), i)
                    if rope.rotary:
                        with when(i < rope.rotary):
                            partner = _partner(rope.half, i)
                            other = value(let(k.raw("qkv", source + partner), "float32"), partner)
                            found[place] = _rotated(k, angle, rope.half, i, let(found[place], "float32"), other)
            if rope.norm_rotated:
                find_factor(number)
                with strip.each() as (place, i), when(turns == 1):
                    found[place] = found[place] * factor.get() * (norm(i) if rope.qk_norm else T.float32(1.0))
            with when(head < rope.heads), strip.each() as (place, i):
                k.store("out", found[place], (token * rope.heads + head) * rope.head_dim + i)
            if writer is not None:
                slot = let(k.raw("slot_mapping", token))
                kv_block, offset = let(T.truncdiv(slot, rope.block)), let(T.truncmod(slot, rope.block))
                widest = writer.widest(strip, number)
                for pool, first in ((rope.keys, rope.heads), (rope.values, rope.heads + rope.kv_heads)):
                    own = let(head - first)
                    with when(T.And(own >= 0, own < rope.kv_heads)):
                        stated = let(k.raw("kv_scales", head - rope.heads), "float32") if rope.stated_scales else None
                        writer.write(pool, (kv_block, own, offset), strip, number, widest, stated)
    return k.function()


def latent_kv_write(spec: KernelSpec) -> tirx.PrimFunc:
    """Behind the heads of a token, one more group has its latent vector and the rotated key."""
    p = spec.as_dict()
    heads, rank, rotary, block = int(p["num_heads"]), int(p["rank"]), int(p["rotary_dim"]), int(p["block_size"])
    half, query_dim, width = rotary // 2, int(p["query_dim"]), rank + rotary
    keys = key_pool(str(p["kv_dtype"]), 1, width, block, int(p["key_scales"]))
    inputs = {"q": "f32", "kv": "f32", "norm": "f32", "cos_sin": "f32", "positions": "i32", "slot_mapping": "i32"}
    with Frame(spec.symbol(), {**inputs, "k_pool": keys.buffer_dtype, "out": "f32"}) as k:
        latent, turning, squares_of, writer = Strip(k, rank), Strip(k, rotary), Fold(k, add), _Writer(k, keys)
        with calling(k).share_groups(let(k.scalar(NUM_TOKENS) * (heads + 1))) as unit:
            token, head = let(T.truncdiv(unit, heads + 1)), let(T.truncmod(unit, heads + 1))
            angle, source = let(k.raw("positions", token) * rotary), let(token * width)
            turned, normed = Array(turning.places), Array(latent.places)
            squares = Cell(T.float32(0.0))
            with when(head < heads):
                query = let((token * heads + head + 1) * query_dim - rotary)
                with turning.each() as (_, i):
                    other = k.raw("q", query + _partner(half, i))
                    value = _rotated(k, angle, half, i, k.raw("q", query + i), other)
                    k.store("out", value, (token * heads + head) * rotary + i)
            with latent.each() as (place, _):
                normed[place] = T.float32(0.0)
            with turning.each() as (place, _):
                turned[place] = T.float32(0.0)
            with when(head == heads):
                with latent.each() as (place, i):
                    one = let(k.raw("kv", source + i), "float32")
                    normed[place] = one
                    squares.set(fma(one, one, squares.get()))
                with turning.each() as (place, i):
                    other = k.raw("kv", source + rank + _partner(half, i))
                    turned[place] = _rotated(k, angle, half, i, k.raw("kv", source + rank + i), other)
            factor = _factor(squares_of(squares.get()), rank, float(p["norm_eps"]))
            with when(head == heads), latent.each() as (place, i):
                normed[place] = normed[place] * factor * k.raw("norm", i)
            slot = let(k.raw("slot_mapping", token))
            at = let(T.truncdiv(slot, block)), T.int32(0), let(T.truncmod(slot, block))
            for which, (strip, found, first) in enumerate(((latent, normed, 0), (turning, turned, rank))):
                number = _numbers(found)
                widest = writer.widest(strip, number)
                with when(head == heads):
                    writer.write(keys, at, strip, number, widest, None, (which, first))
    return k.function()


def _numbers(of: Array) -> _Number:
    return lambda place, _: of[place]
