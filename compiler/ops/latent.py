"""The ops of latent attention: per-head linear layers, the write of keys to the cache, and attention to them.

The cache has one key per token for all heads, and no values: they are the leading elements of keys.
"""

from __future__ import annotations

from typing import Any

from llmc.compiler.graph.commands import Site
from llmc.compiler.kernel_spec import KernelSpec, Param
from llmc.compiler.ops.adapters import adapter_scratch, with_head_adapters
from llmc.compiler.ops.definition import (
    ANY_FLOAT,
    F32,
    I32,
    Argument,
    BufferSource,
    Call,
    GraphParams,
    KernelCall,
    OpDef,
)
from llmc.kv_dtypes import LATENT_SCALES

HEAD_LINEAR_KERNELS = ("head_linear", "packed_head_linear")


def head_linear_spec(weight_dtype: str, gives: str, **params: Param) -> KernelSpec:
    """The kernel of y [rows, n]: per head, the leading k elements of x [rows, heads, stride] times its rows of a weight
    [n, k].

    gives: dtype of y as a packed activation; "" for float32 rows.
    params: heads, k, n, stride, rows (the scalar that counts valid ones) and the target's row parameters.
    """
    op = HEAD_LINEAR_KERNELS[bool(gives)]
    return KernelSpec.of("linear", op, weight_dtype=weight_dtype, gives=gives, **params)


def _head_linear(site: Site, graph: GraphParams) -> list[KernelCall]:
    n, k = site.attributes["weight_shapes"]["weight"]
    heads, gives = int(site.attributes["num_heads"]), graph.act_dtype if site.op == PACKED_HEAD_LINEAR.name else ""
    stride = int(site.attributes["widths"]["x"]) // heads
    spec = head_linear_spec(graph.act_dtype, gives, heads=heads, k=k, n=n, stride=stride, **graph.rows(site))
    return with_head_adapters(site, graph, stride, [KernelCall(spec, ("x", "weight", "out"))])


def _latent_kv_write(site: Site, graph: GraphParams) -> list[KernelCall]:
    a = site.attributes
    (rank,), rotary = a["weight_shapes"]["norm"], int(a["widths"]["cos_sin"])
    spec = KernelSpec.of(
        "rope",
        "latent_kv_write",
        num_heads=a["num_heads"],
        query_dim=int(a["widths"]["q"]) // int(a["num_heads"]),
        rank=rank,
        rotary_dim=rotary,
        norm_eps=float(a["norm_eps"]),
        **_of_cache(rank + rotary, graph),
    )
    return [KernelCall(spec, ("q", "kv", "norm", "cos_sin", "positions", "slot_mapping", BufferSource.K_POOL, "out"))]


def _of_cache(key_dim: int, graph: GraphParams) -> dict[str, Param]:
    """Parameters of the cache's layout."""
    return {
        "num_kv_heads": 1,
        "head_dim": key_dim,
        "key_scales": LATENT_SCALES,
        "kv_dtype": graph.kv_dtype,
        "block_size": graph.block_size,
    }


def _latent_attention(site: Site, graph: GraphParams) -> list[KernelCall]:
    a, segments = site.attributes, graph.shape.segments
    heads = int(a["num_heads"])
    rank, rotated = (int(a["widths"][name]) // heads for name in ("q", "q_rotated"))
    spec = KernelSpec.of(
        "attention",
        "latent_attention",
        num_heads=heads,
        rank=rank,
        scale=float(a["scale"]),
        segments=segments,
        **_of_cache(rank + rotated, graph),
        **graph.target.attention_params(graph.shape),
    )
    inputs = ("q", "q_rotated", "block_tables", "token_seq", "positions", BufferSource.K_POOL)
    if not segments:
        return [KernelCall(spec, (*inputs, "out"))]
    merge = KernelSpec.of(
        "attention",
        "merge_attention",
        num_heads=heads,
        head_dim=rank,
        window=0,
        act_dtype="f32",
        block_size=graph.block_size,
        segments=segments,
        **graph.target.row_params(1),
    )
    return [
        KernelCall(spec, (*inputs, BufferSource.SCRATCH, "out")),
        KernelCall(merge, ("positions", BufferSource.SCRATCH, "out")),
    ]


def _scratch_bytes(site: Site, graph: GraphParams) -> int:
    heads, shape = int(site.attributes["num_heads"]), graph.shape
    rank = int(site.attributes["widths"]["q"]) // heads
    return graph.target.attention_scratch_bytes(shape.tokens, heads, rank, shape.segments)


def _packed_result(call: Call) -> tuple[tuple[Any, int], str]:
    return (call.shapes["x"][0], call.packed_width(call.shapes["weight"][0])), call.act.long_name


_HEAD_ARGUMENTS = {"x": Argument(2, F32), "weight": Argument(2, ANY_FLOAT)}
HEAD_LINEAR = OpDef(
    "head_linear",
    _HEAD_ARGUMENTS,
    lambda call: ((call.shapes["x"][0], call.shapes["weight"][0]), F32[0]),
    _head_linear,
    scratch_parts=adapter_scratch,
)
PACKED_HEAD_LINEAR = OpDef("packed_head_linear", _HEAD_ARGUMENTS, _packed_result, _head_linear, packed_result=True)
LATENT_KV_WRITE = OpDef(
    "latent_kv_write",
    {
        "q": Argument(2, F32),
        "kv": Argument(2, F32),
        "norm": Argument(1, F32),
        "cos_sin": Argument(2, F32),
        "positions": Argument(1, I32),
        "slot_mapping": Argument(1, I32),
    },
    lambda call: ((call.shapes["q"][0], call.values["num_heads"] * int(call.shapes["cos_sin"][1])), F32[0]),
    _latent_kv_write,
)
LATENT_ATTENTION = OpDef(
    "latent_attention",
    {
        "q": Argument(2, F32),
        "q_rotated": Argument(2, F32),
        "block_tables": Argument(2, I32),
        "context_lens": Argument(1, I32),
        "query_start": Argument(1, I32),
        "token_seq": Argument(1, I32),
        "positions": Argument(1, I32),
    },
    lambda call: (call.shapes["q"], F32[0]),
    _latent_attention,
    scratch_bytes=_scratch_bytes,
)
