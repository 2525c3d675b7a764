"""permute_columns: reorders the columns of a packed activation to a weight's stored column order."""

from __future__ import annotations

from llmc.compiler.graph.commands import Site
from llmc.compiler.kernel_spec import KernelSpec, Param
from llmc.compiler.ops.definition import ANY_FLOAT, Argument, BufferSource, GraphParams, KernelCall, OpDef
from llmc.compiler.weight_request import COLUMNS


def permute_spec(dim: int, act_dtype: str, **rows: Param) -> KernelSpec:
    """The kernel of out [rows, dim]: its column j is column columns[j] of x. rows: row layout, and the scalar that
    counts rows."""
    return KernelSpec.of("other", "permute_columns", dim=dim, act_dtype=act_dtype, **rows)


def _kernels(site: Site, graph: GraphParams) -> list[KernelCall]:
    spec = permute_spec(int(site.attributes["widths"]["x"]), graph.act_dtype, **graph.rows(site))
    return [KernelCall(spec, ("x", BufferSource.of_weight(COLUMNS), "out"))]


# The weight names whose columns they are; its numbers are not read.
PERMUTE_COLUMNS = OpDef(
    "permute_columns",
    {"x": Argument(2, ANY_FLOAT, packed=True), "weight": Argument(2, ANY_FLOAT)},
    lambda call: (call.shapes["x"], call.act.long_name),
    _kernels,
    packed_result=True,
    traced=False,
)
