"""The ops of layers with a state in place of keys and values: a short convolution, and the gated delta rule.

States lie in slots of the layer's pools, float32: the K pool has the states of heads, the V pool the inputs that the
convolution of later tokens reads. A layer without states of heads has these in the K pool, which is never empty.
"""

from __future__ import annotations

from llmc.compiler.graph.commands import Site
from llmc.compiler.kernel_spec import KernelSpec, Param
from llmc.compiler.ops.definition import F32, I32, Argument, BufferSource, GraphParams, KernelCall, OpDef

OF_SEQUENCES = {
    "state_slots": Argument(2, I32),
    "query_start": Argument(1, I32),
    "positions": Argument(1, I32),
}


def _short_conv(site: Site, graph: GraphParams) -> list[KernelCall]:
    taps, (weights,) = int(site.attributes["taps"]), site.attributes["weight_shapes"]["weight"]
    bias, activation = ("bias",) if "bias" in site.tensors else (), str(site.attributes["activation"])
    more: dict[str, Param] = {"bias": True} if bias else {}
    more |= {} if activation == "silu" else {"activation": activation}
    spec = KernelSpec.of(
        "other",
        "short_conv",
        channels=weights // taps,
        stride=site.attributes["widths"]["x"],
        taps=taps,
        **more,
    )
    pool = BufferSource.K_POOL if site.attributes["alone"] else BufferSource.V_POOL
    return [KernelCall(spec, ("x", "weight", *bias, *OF_SEQUENCES, pool, "out"))]


def _delta_rule(site: Site, graph: GraphParams) -> list[KernelCall]:
    a = site.attributes
    heads, key_heads, key_dim = int(a["widths"]["gates"]) // 2, int(a["key_heads"]), int(a["key_dim"])
    spec = KernelSpec.of(
        "attention",
        "delta_rule",
        heads=heads,
        key_heads=key_heads,
        key_dim=key_dim,
        value_dim=(int(a["widths"]["qkv"]) - 2 * key_heads * key_dim) // heads,
        tiled=bool(a["tiled"]),
    )
    return [KernelCall(spec, ("qkv", "gates", *OF_SEQUENCES, BufferSource.K_POOL, "out"))]


SHORT_CONV = OpDef(
    "short_conv",
    {"x": Argument(2, F32), "weight": Argument(1, F32), **OF_SEQUENCES, "bias": Argument(1, F32)},
    lambda call: ((call.shapes["x"][0], call.shapes["weight"][0] // call.values["taps"]), F32[0]),
    _short_conv,
)
DELTA_RULE = OpDef(
    "delta_rule",
    {"qkv": Argument(2, F32), "gates": Argument(2, F32), **OF_SEQUENCES},
    lambda call: (
        (call.shapes["qkv"][0], call.shapes["qkv"][1] - 2 * call.values["key_heads"] * call.values["key_dim"]),
        F32[0],
    ),
    _delta_rule,
)
