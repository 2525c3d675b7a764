"""Latent attention: linear layers per head, and keys shared by all heads, whose leading elements are the values."""

from __future__ import annotations

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from llmc.compiler.kernel_spec import KernelSpec
from llmc.compiler.targets.reference.kernels.frame import (
    BLOCK_TABLE_STRIDE,
    NUM_TOKENS,
    Array,
    Cell,
    Expr,
    Frame,
    let,
    row_width,
)
from llmc.compiler.targets.reference.kernels.functions import exp
from llmc.compiler.targets.reference.kernels.kv_pools import key_pool
from llmc.compiler.targets.reference.kernels.rows import write_activation


def head_linear(spec: KernelSpec) -> tirx.PrimFunc:
    """Columns outermost: a weight row is read once for all rows of x."""
    p = spec.as_dict()
    heads, columns, inner, stride = int(p["heads"]), int(p["n"]), int(p["k"]), int(p["stride"])
    dtype, gives, of_head = str(p["weight_dtype"]), str(p["gives"]), columns // heads
    with (
        Frame(spec.symbol(), {"x": "f32", "weight": dtype, "out": gives or "f32"}) as k,
        k.share(T.int32(columns)) as column,
        T.serial(k.scalar(int(p["rows"]))) as row,
    ):
        source = let((row * heads + T.truncdiv(column, of_head)) * stride)
        total = Cell(T.float32(0.0))
        with T.serial(inner) as i:
            weight = k.load("weight", column * row_width(inner, dtype) + i)
            total.set(total.get() + k.raw("x", source + i) * weight)
        if gives:
            write_activation(k, row, columns, gives, column, total.get())
        else:
            k.store("out", total.get(), row * columns + column)
    return k.function()


def latent_kv_write(spec: KernelSpec) -> tirx.PrimFunc:
    p = spec.as_dict()
    heads, rank, rotary, block = int(p["num_heads"]), int(p["rank"]), int(p["rotary_dim"]), int(p["block_size"])
    half, query_dim, width = rotary // 2, int(p["query_dim"]), rank + rotary
    keys = key_pool(str(p["kv_dtype"]), 1, width, block, int(p["key_scales"]))
    inputs = {"q": "f32", "kv": "f32", "norm": "f32", "cos_sin": "f32", "positions": "i32", "slot_mapping": "i32"}
    with (
        Frame(spec.symbol(), {**inputs, "k_pool": keys.buffer_dtype, "out": "f32"}) as k,
        k.share(k.scalar(NUM_TOKENS) * (heads + 1)) as unit,
    ):
        token, head = let(T.truncdiv(unit, heads + 1)), let(T.truncmod(unit, heads + 1))
        angle = let(k.raw("positions", token) * rotary)

        def turned(of: str, source: Expr, i: int | Expr, *, second: bool) -> Expr:
            """Element i of the first (or second) half of the vector at `source`, rotated."""
            cos, sin = k.raw("cos_sin", angle + i), k.raw("cos_sin", angle + half + i)
            low, high = k.raw(of, source + i), k.raw(of, source + half + i)
            return high * cos + low * sin if second else low * cos - high * sin

        with T.If(head < heads):
            with T.Then():
                source = let((token * heads + head + 1) * query_dim - rotary)
                to = let((token * heads + head) * rotary)
                with T.serial(half) as i:
                    k.store("out", turned("q", source, i, second=False), to + i)
                    k.store("out", turned("q", source, i, second=True), to + half + i)
            with T.Else():
                source, slot = let(token * width), let(k.raw("slot_mapping", token))
                key, squares = Array(width), Cell(T.float32(0.0))
                with T.serial(rank) as i:
                    squares.set(squares.get() + k.raw("kv", source + i) * k.raw("kv", source + i))
                mean = squares.get() / T.float32(rank)
                factor = let(T.float32(1.0) / T.sqrt(mean + T.float32(float(p["norm_eps"]))), "float32")
                with T.serial(rank) as i:
                    key[i] = k.raw("kv", source + i) * factor * k.raw("norm", i)
                with T.serial(half) as i:
                    key[rank + i] = turned("kv", source + rank, i, second=False)
                    key[rank + half + i] = turned("kv", source + rank, i, second=True)
                place = let(T.truncdiv(slot, block)), T.int32(0), let(T.truncmod(slot, block))
                keys.write(k, *place, lambda i: key[i], None, 0, (0, rank))
                keys.write(k, *place, lambda i: key[rank + i], None, 1, (rank, rotary))
    return k.function()


def latent_attention(spec: KernelSpec) -> tirx.PrimFunc:
    p = spec.as_dict()
    heads, rank, width, block = int(p["num_heads"]), int(p["rank"]), int(p["head_dim"]), int(p["block_size"])
    rotated, keys = width - rank, key_pool(str(p["kv_dtype"]), 1, width, block, int(p["key_scales"]))
    inputs = {"q": "f32", "q_rotated": "f32", "block_tables": "i32", "token_seq": "i32", "positions": "i32"}
    with Frame(spec.symbol(), {**inputs, "k_pool": keys.buffer_dtype, "out": "f32"}) as k:
        stride = k.scalar(BLOCK_TABLE_STRIDE)
        with k.share(k.scalar(NUM_TOKENS) * heads) as unit:
            token = let(T.truncdiv(unit, heads))
            table, last = let(k.raw("token_seq", token) * stride), let(k.raw("positions", token))
            totals = Array(rank)

            def place_of(position: Expr) -> tuple[Expr, Expr, Expr]:
                kv_block = let(k.raw("block_tables", table + T.truncdiv(position, block)))
                return kv_block, T.int32(0), let(T.truncmod(position, block))

            def score(position: Expr) -> Expr:
                place = place_of(position)
                key, latent, turned = keys.row(*place), Cell(T.float32(0.0)), Cell(T.float32(0.0))
                with T.serial(rank) as i:
                    latent.set(latent.get() + k.raw("q", unit * rank + i) * keys.number(k, key + i))
                with T.serial(rotated) as i:
                    product = k.raw("q_rotated", unit * rotated + i) * keys.number(k, key + rank + i)
                    turned.set(turned.get() + product)
                total = latent.get() * keys.scale(k, *place) + turned.get() * keys.scale(k, *place, 1)
                return let(total * T.float32(float(p["scale"])), "float32")

            most, weights = Cell(T.float32(-3.0e38)), Cell(T.float32(0.0))
            with T.serial(let(last + 1)) as position:
                most.set(T.max(most.get(), score(position)))
            with T.serial(rank) as i:
                totals[i] = T.float32(0.0)
            with T.serial(let(last + 1)) as position:
                weight = let(exp(score(position) - most.get()), "float32")
                weights.set(weights.get() + weight)
                place = place_of(position)
                value, share = keys.row(*place), let(weight * keys.scale(k, *place), "float32")
                with T.serial(rank) as i:
                    totals[i] = totals[i] + share * keys.number(k, value + i)
            with T.serial(rank) as i:
                k.store("out", totals[i] / weights.get(), unit * rank + i)
    return k.function()
