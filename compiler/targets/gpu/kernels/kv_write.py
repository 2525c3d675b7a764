"""rope_kv_write and latent_kv_write: a group works on a head of a token, and each item has some of its elements.

What norms and scales need of all elements is folded. An item rotates its elements alone, as it reads the other half's.
"""

from __future__ import annotations

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from llmc.compiler.kernel_spec import KernelSpec
from llmc.compiler.targets.gpu.kernels.fma import fma
from llmc.compiler.targets.gpu.kernels.fold import Fold, add, largest
from llmc.compiler.targets.gpu.kernels.groups import calling
from llmc.compiler.targets.gpu.kernels.rows import root_factor
from llmc.compiler.targets.gpu.kernels.strips import Strip
from llmc.compiler.targets.gpu.kernels.turned import Elements, Number, OfGroup, Turning, partner_of, rotated
from llmc.compiler.targets.reference.kernels.attention import RopeWrite
from llmc.compiler.targets.reference.kernels.frame import NUM_TOKENS, Array, Cell, Expr, Frame, is_nan, let, when
from llmc.compiler.targets.reference.kernels.kv_pools import Pool, key_pool


class Writer:
    """Writes a position's part of a pool from numbers that the items have."""

    def __init__(self, k: Frame, pool: Pool) -> None:
        """pool: of those that are written, which have one dtype."""
        self._k, self._widest = k, None if pool.largest is None else Fold(k, largest)

    def widest(self, strip: Elements, number: Number) -> Expr | None:
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
        strip: Elements,
        number: Number,
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


def rope_kv_write(spec: KernelSpec) -> tirx.PrimFunc:
    rope = RopeWrite(spec)
    with Frame(spec.symbol(), rope.buffers) as k:
        sharing = OfGroup(k, rope.head_dim, sums=rope.qk_norm or rope.norm_rotated)
        strip, turning = sharing.elements, Turning(k, rope, sharing)
        writer = Writer(k, rope.keys) if rope.kv_heads else None
        with calling(k).share_groups(let(k.scalar(NUM_TOKENS) * rope.all_heads)) as unit:
            token, head = let(T.truncdiv(unit, rope.all_heads)), let(T.truncmod(unit, rope.all_heads))
            source, angle = let(unit * rope.head_dim), let(k.raw("positions", token) * rope.rotary)
            turns = let(T.Cast("int32", head < rope.heads + rope.kv_heads))

            def norm(i: Expr) -> Expr:
                of_query = let(k.raw("q_norm", i), "float32")
                return T.Select(head < rope.heads, of_query, let(k.raw("k_norm", i), "float32"))

            found = turning.head(source, angle, norm, turns)
            number = numbers_of(found)
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
        latent, turning, squares_of, writer = Strip(k, rank), Strip(k, rotary), Fold(k, add), Writer(k, keys)
        with calling(k).share_groups(let(k.scalar(NUM_TOKENS) * (heads + 1))) as unit:
            token, head = let(T.truncdiv(unit, heads + 1)), let(T.truncmod(unit, heads + 1))
            angle, source = let(k.raw("positions", token) * rotary), let(token * width)
            turned, normed = Array(turning.places), Array(latent.places)
            squares = Cell(T.float32(0.0))
            with when(head < heads):
                query = let((token * heads + head + 1) * query_dim - rotary)
                with turning.each() as (_, i):
                    other = k.raw("q", query + partner_of(half, i))
                    value = rotated(k, angle, half, i, k.raw("q", query + i), other)
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
                    other = k.raw("kv", source + rank + partner_of(half, i))
                    turned[place] = rotated(k, angle, half, i, k.raw("kv", source + rank + i), other)
            factor = root_factor(squares_of(squares.get()), rank, float(p["norm_eps"]))
            with when(head == heads), latent.each() as (place, i):
                normed[place] = normed[place] * factor * k.raw("norm", i)
            slot = let(k.raw("slot_mapping", token))
            at = let(T.truncdiv(slot, block)), T.int32(0), let(T.truncmod(slot, block))
            for which, (strip, found, first) in enumerate(((latent, normed, 0), (turning, turned, rank))):
                number = numbers_of(found)
                widest = writer.widest(strip, number)
                with when(head == heads):
                    writer.write(keys, at, strip, number, widest, None, (which, first))
    return k.function()


def numbers_of(of: Array) -> Number:
    """The numbers of an item's elements."""
    return lambda place, _: of[place]
