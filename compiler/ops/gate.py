"""silu_gate: silu(gate) · up, for rows that hold gate and up side by side, in the layout of linear layers.

A `gated_linear` applies the gate to its own sums; this op serves layers where something is added before the gate.
"""

from __future__ import annotations

from typing import Any

from llmc.compiler.graph.commands import Site
from llmc.compiler.kernel_spec import KernelSpec
from llmc.compiler.ops.definition import F32, Argument, Call, GraphParams, KernelCall, OpDef


def _kernels(site: Site, graph: GraphParams) -> list[KernelCall]:
    width = int(site.attributes["widths"]["x"]) // 2
    spec = KernelSpec.of("activation", "silu_gate", dim=width, act_dtype=graph.act_dtype, **graph.rows(site))
    return [KernelCall(spec, ("x", "out"))]


def _result(call: Call) -> tuple[tuple[Any, int], str]:
    return (call.shapes["x"][0], call.packed_width(int(call.shapes["x"][1]) // 2)), call.act.long_name


SILU_GATE = OpDef(
    "silu_gate",
    {"x": Argument(2, F32)},
    _result,
    _kernels,
    packed_result=True,
    traced=False,
)
