"""gather_rows: copies the rows whose logits are needed, or several consecutive ones for each sample."""

from __future__ import annotations

from llmc.compiler.graph.commands import Site
from llmc.compiler.kernel_spec import KernelSpec
from llmc.compiler.ops.definition import F32, I32, Argument, GraphParams, KernelCall, OpDef


def _gather_rows(site: Site, graph: GraphParams) -> list[KernelCall]:
    count = site.attributes.get("count", 1)
    several = {"count": count} if count > 1 else {}
    spec = KernelSpec.of("gather", "gather_rows", dim=site.attributes["widths"]["x"], **several)
    return [KernelCall(spec, ("x", "index", "out"))]


GATHER_ROWS = OpDef(
    "gather_rows",
    {"x": Argument(2, F32), "index": Argument(1, I32)},
    lambda call: ((call.shapes["index"][0], call.values.get("count", 1) * call.shapes["x"][1]), F32[0]),
    _gather_rows,
)
