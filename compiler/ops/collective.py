"""What ranks do together: all_reduce and all_gather combine the partial results of a stage's ranks, pass_on hands
results to the next stage. They have no kernel: the runtime executes them from the record of the collective (FORMAT.md).
Where a target adds the parts of ranks itself, an all_reduce gathers them for its kernel `rank_sum`.
"""

from __future__ import annotations

from llmc.compiler.graph.commands import Site
from llmc.compiler.kernel_spec import KernelSpec
from llmc.compiler.ops.definition import F32, NUM_SAMPLES, Argument, BufferSource, GraphParams, KernelCall, OpDef
from llmc.graphs_format import ADDS_BIAS, ADDS_RESIDUAL, COLLECTIVES, PASS_ON
from llmc.graphs_records import CollectiveRecord

RANKS, WIDTH = "ranks", "width"
"""Attributes of a site: the number of ranks, and the floats in a row of the result."""
_ADDED = {"bias": ADDS_BIAS, "residual": ADDS_RESIDUAL}


def is_collective(spec: KernelSpec) -> bool:
    """Whether a spec stands for a collective rather than a kernel."""
    return spec.op in COLLECTIVES


def record_of(spec: KernelSpec) -> CollectiveRecord:
    """The record of the collective that `spec` stands for."""
    params = spec.as_dict()
    rows = int(params["rows"] == NUM_SAMPLES)
    adds, stage = int(params.get("adds", 0)), int(params.get("stage", 0))
    return CollectiveRecord(COLLECTIVES.index(spec.op), rows, int(params[WIDTH]), adds, stage)


def pass_on(stage: int, rows: int, width: int) -> KernelSpec:
    """Stands for handing rows of a stage to the next one. rows: NUM_TOKENS or NUM_SAMPLES."""
    return KernelSpec.of("other", COLLECTIVES[PASS_ON], rows=rows, width=width, stage=stage)


def _collective(site: Site, graph: GraphParams) -> list[KernelCall]:
    added = [name for name in _ADDED if name in site.tensors]
    rows, width = graph.rows(site)["rows"], int(site.attributes[WIDTH])
    spec = KernelSpec.of("other", site.op, rows=rows, width=width, adds=sum(_ADDED[name] for name in added))
    return [KernelCall(spec, ("x", *added, "out"))]


def _sum(site: Site, graph: GraphParams) -> list[KernelCall]:
    if not graph.target.adds_parts:
        return _collective(site, graph)
    added = [name for name in _ADDED if name in site.tensors]
    rows, ranks, width = graph.rows(site)["rows"], int(site.attributes[RANKS]), int(site.attributes[WIDTH])
    gathered = KernelSpec.of("other", ALL_GATHER.name, rows=rows, width=ranks * width, adds=0)
    adds = sum(_ADDED[name] for name in added)
    summed = KernelSpec.of("other", "rank_sum", **graph.rows(site), ranks=ranks, width=width, adds=adds)
    parts = BufferSource.SCRATCH
    return [KernelCall(gathered, ("x", parts)), KernelCall(summed, (parts, *added, "out"))]


def _parts_bytes(site: Site, graph: GraphParams) -> int:
    if not graph.target.adds_parts:
        return 0
    rows = graph.shape.samples if site.attributes["on_samples"] else graph.shape.tokens
    return 4 * rows * int(site.attributes[RANKS]) * int(site.attributes[WIDTH])


ALL_REDUCE = OpDef(
    "all_reduce",
    {"x": Argument(2, F32), "bias": Argument(1, F32), "residual": Argument(2, F32)},
    lambda call: (call.shapes["x"], F32[0]),
    _sum,
    scratch_bytes=_parts_bytes,
    traced=False,
    calls=(),
    runs_on=lambda target: target.runs_ranks,
)
ALL_GATHER = OpDef(
    "all_gather",
    {"x": Argument(2, F32)},
    lambda call: ((call.shapes["x"][0], int(call.shapes["x"][1]) * int(call.values[RANKS])), F32[0]),
    _collective,
    traced=False,
    calls=(),
    runs_on=lambda target: target.runs_ranks,
)
