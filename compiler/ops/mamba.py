"""The op of Mamba-2's states. They lie in the K pool of their layer, float32."""

from __future__ import annotations

from llmc.compiler.graph.commands import Site
from llmc.compiler.kernel_spec import KernelSpec
from llmc.compiler.ops.definition import F32, Argument, BufferSource, Call, GraphParams, KernelCall, OpDef
from llmc.compiler.ops.delta import OF_SEQUENCES


def _selective_state(site: Site, graph: GraphParams) -> list[KernelCall]:
    a = site.attributes
    heads, groups, state_size = int(a["widths"]["steps"]) // 2, int(a["groups"]), int(a["state_size"])
    spec = KernelSpec.of(
        "attention",
        "selective_state",
        heads=heads,
        head_dim=(int(a["widths"]["xbc"]) - 2 * groups * state_size) // heads,
        groups=groups,
        state_size=state_size,
    )
    return [KernelCall(spec, ("xbc", "steps", "skip", *OF_SEQUENCES, BufferSource.K_POOL, "out"))]


def _result(call: Call) -> tuple[tuple[object, int], str]:
    return (call.shapes["xbc"][0], call.shapes["xbc"][1] - 2 * call.values["groups"] * call.values["state_size"]), F32[
        0
    ]


SELECTIVE_STATE = OpDef(
    "selective_state",
    {"xbc": Argument(2, F32), "steps": Argument(2, F32), "skip": Argument(1, F32), **OF_SEQUENCES},
    _result,
    _selective_state,
)
