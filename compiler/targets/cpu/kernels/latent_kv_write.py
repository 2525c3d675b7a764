"""latent_kv_write: rotates queries and keys (half-split), norms the latent part of keys, and writes keys to the
pool."""

from __future__ import annotations

from collections.abc import Callable

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from llmc.compiler.kernel_spec import KernelSpec, KernelSpecError
from llmc.compiler.targets.cpu.kernels import builder as b
from llmc.compiler.targets.cpu.kernels.ir import vector
from llmc.compiler.targets.cpu.kernels.kv_pools import KvPools, Writer
from llmc.compiler.targets.cpu.kernels.rope import inverse_root
from llmc.compiler.targets.cpu.target import Target


def buffers(spec: KernelSpec) -> tuple[str, ...]:
    return ("q", "kv", "norm", "cos_sin", "positions", "slot_mapping", "k_pool", "out")


def build(spec: KernelSpec, target: Target) -> tirx.PrimFunc:
    p = spec.as_dict()
    heads, rank, rotary, kv, block = (
        int(p["num_heads"]),
        int(p["rank"]),
        int(p["rotary_dim"]),
        str(p["kv_dtype"]),
        int(p["block_size"]),
    )
    half, query_dim = rotary // 2, int(p["query_dim"])
    pools = KvPools(kv, 1, rank + rotary, block, int(p["key_scales"]))
    if rotary % 2 or rotary > query_dim:
        raise KernelSpecError(f"latent_kv_write: bad rotary_dim {rotary} or query_dim {query_dim}")
    latent, pairs = b.pieces(rank), b.pieces(half)
    keys = [*latent, *((rank + start, n) for start, n in pairs), *((rank + half + start, n) for start, n in pairs)]
    writer = Writer(pools, keys, [])
    types = {"positions": "int32", "slot_mapping": "int32", "k_pool": pools.word_dtype}
    helpers = vector.helpers(target.mcpu) + writer.helpers()
    kernel = b.Kernel(spec.symbol(), [(name, types.get(name, "float32")) for name in buffers(spec)], helpers)
    with kernel as k, k.share(k.scalar(0) * (heads + 1)) as unit:
        token = b.let(T.truncdiv(unit, heads + 1))
        head = b.let(unit - token * (heads + 1))
        angle = b.let(k["positions"][token] * rotary)

        def rotate(of: str, source: b.Expr, put: Callable[[b.Expr, int, int], None]) -> None:
            """Rotates the elements of buffer `of` from `source` on."""
            for start, count in pairs:
                pair = b.Vectors(4)
                for i, (buffer, at) in enumerate(((k[of], source), (k["cos_sin"], angle))):
                    pair[2 * i] = b.load_vector(buffer, at + start, count)
                    pair[2 * i + 1] = b.load_vector(buffer, at + half + start, count)
                low = b.call("fnma", b.splat(1.0), b.call("mul", pair[1], pair[3]), b.call("mul", pair[0], pair[2]))
                high = b.call("add", b.call("mul", pair[1], pair[2]), b.call("mul", pair[0], pair[3]))
                put(low, start, count)
                put(high, half + start, count)

        with T.If(head < heads):
            with T.Then():
                to = b.let((token * heads + head) * rotary)
                source = b.let((token * heads + head + 1) * query_dim - rotary)
                rotate("q", source, lambda v, start, count: b.store_vector(k["out"], v, to + start, count))
            with T.Else():
                slot, source = b.let(k["slot_mapping"][token]), b.let(token * (rank + rotary))
                base = b.let(pools.keys(T.truncdiv(slot, block), T.int32(0)))
                within = b.let(T.truncmod(slot, block))
                key, rotated = (writer.key(k["k_pool"], base, within, part) for part in range(2))
                scale = inverse_root(
                    [b.load_vector(k["kv"], source + start, count) for start, count in latent],
                    rank,
                    float(p["norm_eps"]),
                )
                for start, count in latent:
                    value = b.call("mul", b.load_vector(k["kv"], source + start, count), scale[0])
                    key.put(b.call("mul", value, b.load_vector(k["norm"], start, count)), start, count)
                key.finish(None)
                rotate("kv", b.let(source + rank), lambda v, start, count: rotated.put(v, rank + start, count))
                rotated.finish(None)
    return kernel.function()
