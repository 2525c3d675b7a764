"""activate: f(x) of plain rows, or f(gate) · up of rows that hold both side by side, in the layout of linear layers.

`activated_linear` and `gated_linear` do this to their own sums; this op serves layers where something is added first.
Without an activation, it only packs rows.
"""

from __future__ import annotations

from typing import Any

from llmc.compiler.graph.commands import Site
from llmc.compiler.kernel_spec import KernelSpec
from llmc.compiler.ops.definition import F32, Argument, Call, GraphParams, KernelCall, OpDef

NO_ACTIVATION = ""


def _kernels(site: Site, graph: GraphParams) -> list[KernelCall]:
    gated = bool(site.attributes["gated"])
    spec = KernelSpec.of(
        "activation",
        ACTIVATE.name,
        dim=int(site.attributes["widths"]["x"]) // (2 if gated else 1),
        act_dtype=graph.act_dtype,
        activation=str(site.attributes["activation"]),
        gated=gated,
        **graph.rows(site),
    )
    return [KernelCall(spec, ("x", "out"))]


def _result(call: Call) -> tuple[tuple[Any, int], str]:
    width = int(call.shapes["x"][1]) // (2 if call.values["gated"] else 1)
    return (call.shapes["x"][0], call.packed_width(width)), call.act.long_name


ACTIVATE = OpDef(
    "activate",
    {"x": Argument(2, F32)},
    _result,
    _kernels,
    packed_result=True,
    traced=False,
)
