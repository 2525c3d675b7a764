"""rms_norm: rows divided by their root mean square."""

from __future__ import annotations

from llmc.compiler.graph.commands import Site
from llmc.compiler.kernel_spec import KernelSpec
from llmc.compiler.ops.definition import F32, Argument, GraphParams, KernelCall, OpDef, written_activation


def _rms_norm(site: Site, graph: GraphParams) -> list[KernelCall]:
    spec = KernelSpec.of(
        "norm",
        "rms_norm",
        dim=site.attributes["widths"]["x"],
        eps=float(site.attributes["eps"]),
        **written_activation(site, graph),
        **graph.rows(site),
    )
    return [KernelCall(spec, ("x", "weight", "out"))]


RMS_NORM = OpDef(
    "rms_norm",
    {"x": Argument(2, F32), "weight": Argument(1, F32)},
    lambda call: ((call.shapes["x"][0], call.packed_width(call.shapes["x"][1])), call.act.long_name),
    _rms_norm,
    packed_result=True,
    writes_int8=True,
)
