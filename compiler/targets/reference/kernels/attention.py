"""rope_kv_write and paged_attention on a cache of rows: block, KV head, place in the block, element."""

from __future__ import annotations

from dataclasses import dataclass

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from llmc.compiler.kernel_spec import KernelSpec, KernelSpecError
from llmc.compiler.targets.reference.kernels.frame import (
    BLOCK_TABLE_STRIDE,
    NUM_TOKENS,
    Array,
    Cell,
    Expr,
    Frame,
    let,
    when,
)
from llmc.compiler.targets.reference.kernels.functions import exp
from llmc.compiler.targets.reference.kernels.padding import VALUES
from llmc.compiler.targets.reference.kernels.rows import write_activation


@dataclass(frozen=True)
class _Pools:
    """Where keys and values lie in their pools."""

    kv_heads: int
    head_dim: int
    block: int

    def _row(self, kv_block: Expr, head: Expr, offset: Expr) -> Expr:
        return (kv_block * self.kv_heads + head) * self.block + offset

    def key(self, kv_block: Expr, head: Expr, offset: Expr) -> Expr:
        """Index of the first element of a key."""
        return self._row(kv_block, head, offset) * self.head_dim

    def value(self, kv_block: Expr, head: Expr, offset: Expr) -> Expr:
        width = -(-self.head_dim // VALUES) * VALUES
        return self._row(kv_block, head, offset) * width


def rope_kv_write(spec: KernelSpec) -> tirx.PrimFunc:
    p = spec.as_dict()
    heads, kv_heads, head_dim = int(p["num_heads"]), int(p["num_kv_heads"]), int(p["head_dim"])
    rotary, kv, block, qk_norm = int(p["rotary_dim"]), str(p["kv_dtype"]), int(p["block_size"]), bool(p["qk_norm"])
    half, all_heads, pools = rotary // 2, heads + 2 * kv_heads, _Pools(kv_heads, head_dim, block)
    norms = {"q_norm": "f32", "k_norm": "f32"} if qk_norm else {}
    inputs = {"qkv": "f32", **norms, "cos_sin": "f32", "positions": "i32", "slot_mapping": "i32"}
    with (
        Frame(spec.symbol(), {**inputs, "k_pool": kv, "v_pool": kv, "out": "f32"}) as k,
        k.share(k.scalar(NUM_TOKENS) * all_heads) as unit,
    ):
        token, head = let(T.truncdiv(unit, all_heads)), let(T.truncmod(unit, all_heads))
        source = let(unit * head_dim)
        slot = let(k.raw("slot_mapping", token))
        kv_block, offset = let(T.truncdiv(slot, block)), let(T.truncmod(slot, block))
        angle = let(k.raw("positions", token) * rotary)
        turned = Array(head_dim)

        def turn(norm: str) -> None:
            """Fills `turned` with the head, normalised and rotated."""
            factor = Cell(T.float32(1.0))
            if qk_norm:
                squares = Cell(T.float32(0.0))
                with T.serial(head_dim) as i:
                    squares.set(squares.get() + k.raw("qkv", source + i) * k.raw("qkv", source + i))
                mean = squares.get() / T.float32(head_dim)
                factor.set(T.float32(1.0) / T.sqrt(mean + T.float32(float(p["norm_eps"]))))

            def value(i: Expr) -> Expr:
                plain = k.raw("qkv", source + i)
                return let(plain * factor.get() * k.raw(norm, i), "float32") if qk_norm else plain

            with T.serial(half) as i:
                cos, sin = k.raw("cos_sin", angle + i), k.raw("cos_sin", angle + half + i)
                low, high = value(i), value(half + i)
                turned[i] = low * cos - high * sin
                turned[half + i] = high * cos + low * sin
            with T.serial(rotary, head_dim) as i:
                turned[i] = value(i)

        with when(head < heads):
            turn("q_norm")
            with T.serial(head_dim) as i:
                k.store("out", turned[i], (token * heads + head) * head_dim + i)
        with when(T.And(head >= heads, head < heads + kv_heads)):
            turn("k_norm")
            key = let(pools.key(kv_block, head - heads, offset))
            with T.serial(head_dim) as i:
                k.store("k_pool", turned[i], key + i)
        with when(head >= heads + kv_heads):
            place = let(pools.value(kv_block, head - (heads + kv_heads), offset))
            with T.serial(head_dim) as i:
                k.store("v_pool", k.raw("qkv", source + i), place + i)
    return k.function()


def paged_attention(spec: KernelSpec) -> tirx.PrimFunc:
    p = spec.as_dict()
    heads, kv_heads, head_dim = int(p["num_heads"]), int(p["num_kv_heads"]), int(p["head_dim"])
    block, window, kv, act = int(p["block_size"]), int(p["window"]), str(p["kv_dtype"]), str(p["act_dtype"])
    if p["segments"]:
        raise KernelSpecError("paged_attention of the reference target does not cut contexts")
    pools, group = _Pools(kv_heads, head_dim, block), heads // kv_heads
    inputs = {"q": "f32", "block_tables": "i32", "token_seq": "i32", "positions": "i32"}
    with Frame(spec.symbol(), {**inputs, "k_pool": kv, "v_pool": kv, "out": act}) as k:
        stride = k.scalar(BLOCK_TABLE_STRIDE)
        with k.share(k.scalar(NUM_TOKENS) * heads) as unit:
            token, head = let(T.truncdiv(unit, heads)), let(T.truncmod(unit, heads))
            kv_head, table = let(T.truncdiv(head, group)), let(k.raw("token_seq", token) * stride)
            last = let(k.raw("positions", token))
            first = let(T.max(last - (window - 1), 0)) if window else T.int32(0)
            totals = Array(head_dim)

            def score(position: Expr) -> Expr:
                kv_block = k.raw("block_tables", table + T.truncdiv(position, block))
                key = let(pools.key(kv_block, kv_head, T.truncmod(position, block)))
                total = Cell(T.float32(0.0))
                with T.serial(head_dim) as i:
                    total.set(total.get() + k.raw("q", unit * head_dim + i) * k.load("k_pool", key + i))
                return let(total.get() * T.float32(float(p["scale"])), "float32")

            most, weights = Cell(T.float32(-3.0e38)), Cell(T.float32(0.0))
            with T.serial(first, let(last + 1)) as position:
                most.set(T.max(most.get(), score(position)))
            with T.serial(head_dim) as i:
                totals[i] = T.float32(0.0)
            with T.serial(first, let(last + 1)) as position:
                weight = exp(score(position) - most.get())
                weights.set(weights.get() + weight)
                kv_block = k.raw("block_tables", table + T.truncdiv(position, block))
                value = let(pools.value(kv_block, kv_head, T.truncmod(position, block)))
                with T.serial(head_dim) as i:
                    totals[i] = totals[i] + weight * k.load("v_pool", value + i)
            with T.serial(head_dim) as i:
                element = let(head * head_dim + i)
                write_activation(k, token, heads * head_dim, act, element, totals[i] / weights.get())
    return k.function()
