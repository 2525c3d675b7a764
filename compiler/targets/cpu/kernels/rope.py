"""rope_kv_write: rotates q and k (half-split), after an optional per-head norm, and writes K and V to the paged
pool."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from llmc.compiler.kernel_spec import KernelSpec, KernelSpecError
from llmc.compiler.targets.cpu.kernels import builder as b
from llmc.compiler.targets.cpu.kernels.ir import vector
from llmc.compiler.targets.cpu.kernels.kv_pools import KvPools, Writer
from llmc.compiler.targets.cpu.target import Target


def buffers(spec: KernelSpec) -> tuple[str, ...]:
    norms = ("q_norm", "k_norm") if spec.as_dict()["qk_norm"] else ()
    if not spec.as_dict()["num_kv_heads"]:
        return ("qkv", *norms, "cos_sin", "positions", "q_out")
    scales = ("kv_scales",) if spec.as_dict().get("kv_scales", False) else ()
    return ("qkv", *norms, *scales, "cos_sin", "positions", "slot_mapping", "k_pool", "v_pool", "q_out")


def inverse_root(vectors: Sequence[b.Expr], count: int, eps: float) -> b.Vectors:
    """1 / sqrt(mean square + eps) over `count` elements."""
    total = b.Vectors(1)
    total[0] = b.splat(0.0)
    for v in vectors:
        total[0] = b.call("fma", v, v, total[0])
    mean = b.call("div", b.call("sum_lanes", total[0]), b.splat(float(count)))
    root = b.call("sqrt", b.call("add", mean, b.splat(eps)))
    scale = b.Vectors(1)
    scale[0] = b.call("div", b.splat(1.0), root)
    return scale


def build(spec: KernelSpec, target: Target) -> tirx.PrimFunc:
    p = spec.as_dict()
    heads, kv_heads, head_dim = int(p["num_heads"]), int(p["num_kv_heads"]), int(p["head_dim"])
    rotary, qk_norm, kv, block = int(p["rotary_dim"]), bool(p["qk_norm"]), str(p["kv_dtype"]), int(p["block_size"])
    if p.get("interleaved", False):
        raise KernelSpecError("rope_kv_write: interleaved rotation has no template; use half-split weights")
    if rotary % 2 or rotary > head_dim:
        raise KernelSpecError(f"rope_kv_write: bad rotary_dim {rotary} or head_dim {head_dim}")
    norm_rotated, eps = bool(p.get("norm_rotated", False)), float(p["norm_eps"])
    half, pools, stated = rotary // 2, KvPools(kv, max(1, kv_heads), head_dim, block), bool(p.get("kv_scales", False))
    rotated = b.pieces(half)
    rest = [(rotary + start, count) for start, count in b.pieces(head_dim - rotary)]
    keys = [*rotated, *((half + start, count) for start, count in rotated), *rest]
    writer = Writer(pools, keys, b.pieces(head_dim))
    pool = pools.word_dtype
    types = {"positions": "int32", "slot_mapping": "int32", "k_pool": pool, "v_pool": pool}
    helpers = vector.helpers(target.mcpu) + writer.helpers()
    kernel = b.Kernel(spec.symbol(), [(name, types.get(name, "float32")) for name in buffers(spec)], helpers)
    width, all_heads = (heads + 2 * kv_heads) * head_dim, heads + 2 * kv_heads
    with kernel as k:
        qkv, cos_sin = k["qkv"], k["cos_sin"]
        rows = k.scalar(int(p.get("rows", 0)))
        with k.share(rows * all_heads) as unit:
            token = b.let(T.truncdiv(unit, all_heads))
            head = b.let(unit - token * all_heads)
            source = b.let(token * width + head * head_dim)
            angle = b.let(k["positions"][token] * rotary)

            def put_query(value: b.Expr, start: int, count: int) -> None:
                b.store_vector(k["q_out"], value, (token * heads + head) * head_dim + start, count)

            def rotate(what: str, put: Callable[[b.Expr, int, int], None]) -> None:
                scale = None
                if qk_norm and not norm_rotated:
                    plain = [b.load_vector(qkv, source + start, count) for start, count in b.pieces(head_dim)]
                    scale = inverse_root(plain, head_dim, eps)
                turned, made = b.Vectors(len(keys)) if norm_rotated else None, list[tuple[int, int]]()

                def take(value: b.Expr, start: int, count: int) -> None:
                    """Receives a part of the rotated head."""
                    if turned is None:
                        put(value, start, count)
                    else:
                        turned[len(made)] = value
                        made.append((start, count))

                def value(start: int, count: int) -> b.Expr:
                    v = b.load_vector(qkv, source + start, count)
                    if scale is None:
                        return v
                    return b.call("mul", b.call("mul", v, scale[0]), b.load_vector(k[f"{what}_norm"], start, count))

                for start, count in rotated:
                    pair = b.Vectors(4)
                    pair[0], pair[1] = value(start, count), value(half + start, count)
                    pair[2] = b.load_vector(cos_sin, angle + start, count)
                    pair[3] = b.load_vector(cos_sin, angle + half + start, count)
                    low = b.call("fnma", b.splat(1.0), b.call("mul", pair[1], pair[3]), b.call("mul", pair[0], pair[2]))
                    high = b.call("add", b.call("mul", pair[1], pair[2]), b.call("mul", pair[0], pair[3]))
                    take(low, start, count)
                    take(high, half + start, count)
                for start, count in rest:
                    take(value(start, count), start, count)
                if turned is None:
                    return
                scale = inverse_root([turned[i] for i in range(len(made))], head_dim, eps)
                for i, (start, count) in enumerate(made):
                    normed = b.call("mul", turned[i], scale[0])
                    if qk_norm:
                        normed = b.call("mul", normed, b.load_vector(k[f"{what}_norm"], start, count))
                    put(normed, start, count)

            def write() -> None:
                """Writes keys and values to the cache."""
                slot = k["slot_mapping"][token]
                kv_block, offset = b.let(T.truncdiv(slot, block)), b.let(T.truncmod(slot, block))
                # Scales of keys, then of values, head by head.
                scale = k["kv_scales"][head - heads] if stated else None
                with b.when(T.And(head >= heads, head < heads + kv_heads)):
                    key = writer.key(k["k_pool"], b.let(pools.keys(kv_block, head - heads)), offset)
                    rotate("k", key.put)
                    key.finish(scale)
                with b.when(head >= heads + kv_heads):
                    base = b.let(pools.values(kv_block, head - heads - kv_heads))
                    taken = writer.value(k["v_pool"], base, offset)
                    for start, count in b.pieces(head_dim):
                        taken.put(b.load_vector(qkv, source + start, count), start, count)
                    taken.finish(scale)

            with b.when(head < heads):
                rotate("q", put_query)
            if kv_heads:
                write()
    return kernel.function()
