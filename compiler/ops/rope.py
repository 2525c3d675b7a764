"""rope_kv_write: rotates queries and keys, and writes keys and values to the cache."""

from __future__ import annotations

from llmc.compiler.graph.commands import Site
from llmc.compiler.kernel_spec import KernelSpec
from llmc.compiler.ops.definition import F32, I32, Argument, BufferSource, GraphParams, KernelCall, OpDef


def _rope_kv_write(site: Site, graph: GraphParams) -> list[KernelCall]:
    a = site.attributes
    qk_norm = "q_norm" in site.tensors
    spec = KernelSpec.of(
        "rope",
        "rope_kv_write",
        num_heads=a["num_heads"],
        num_kv_heads=a["num_kv_heads"],
        head_dim=a["head_dim"],
        rotary_dim=a["widths"]["cos_sin"],
        qk_norm=qk_norm,
        norm_eps=float(a.get("norm_eps", 0.0)),
        kv_dtype=graph.kv_dtype,
        block_size=graph.block_size,
        **({"kv_scales": True} if graph.kv_scales and a["num_kv_heads"] else {}),
        **({"norm_rotated": True} if a.get("norm_rotated", False) else {}),
    )
    norms = ("q_norm", "k_norm") if qk_norm else ()
    if not a["num_kv_heads"]:  # a layer that reads the keys and values of another layer
        return [KernelCall(spec, ("qkv", *norms, "cos_sin", "positions", "out"))]
    scales = (BufferSource.KV_SCALES,) if graph.kv_scales else ()
    pools = (BufferSource.K_POOL, BufferSource.V_POOL)
    return [KernelCall(spec, ("qkv", *norms, *scales, "cos_sin", "positions", "slot_mapping", *pools, "out"))]


ROPE_KV_WRITE = OpDef(
    "rope_kv_write",
    {
        "qkv": Argument(2, F32),
        "q_norm": Argument(1, F32),
        "k_norm": Argument(1, F32),
        "cos_sin": Argument(2, F32),
        "positions": Argument(1, I32),
        "slot_mapping": Argument(1, I32),
    },
    lambda call: ((call.shapes["qkv"][0], call.values["num_heads"] * call.values["head_dim"]), F32[0]),
    _rope_kv_write,
)
