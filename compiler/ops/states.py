"""Hidden states that graphs pass to one another: float32 rows in a buffer beside a graph's inputs.

`gather_rows_leaving` stores those of all tokens there; `beside_states` and `read_states` read them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llmc.compiler.graph.commands import Site
from llmc.compiler.kernel_spec import KernelSpec
from llmc.compiler.ops.definition import (
    F32,
    I32,
    NUM_TOKENS,
    Argument,
    BufferSource,
    GraphParams,
    KernelCall,
    OpDef,
    Template,
)

_BUFFERS = {
    "gather_rows_leaving": ("x", "out"),
    "beside_states": ("x", "states", "out"),
    "read_states": ("states", "out"),
}
"""Of a kernel, by op. Each row of `out` is those of the others, side by side."""


def _gather_rows_leaving(site: Site, graph: GraphParams) -> list[KernelCall]:
    widths = site.attributes["widths"]
    leave = KernelSpec.of("other", "gather_rows_leaving", dim=widths["states"])
    gather = KernelSpec.of("gather", "gather_rows", dim=widths["x"])
    return [KernelCall(leave, ("states", BufferSource.STATES)), KernelCall(gather, ("x", "index", "out"))]


def _beside_states(site: Site, graph: GraphParams) -> list[KernelCall]:
    spec = KernelSpec.of("other", "beside_states", dim=site.attributes["widths"]["x"])
    return [KernelCall(spec, ("x", BufferSource.STATES, "out"))]


def _read_states(site: Site, graph: GraphParams) -> list[KernelCall]:
    spec = KernelSpec.of("other", "read_states", dim=site.attributes["width"])
    return [KernelCall(spec, (BufferSource.STATES, "out"))]


def _reference(spec: KernelSpec) -> Any:
    from llmc.compiler.targets.reference.kernels.frame import Frame

    dim, buffers = int(spec.as_dict()["dim"]), _BUFFERS[spec.op]
    sources = buffers[:-1]
    frame = Frame(spec.symbol(), dict.fromkeys(buffers, "f32"))
    with frame as k, k.share_elements(k.scalar(NUM_TOKENS), dim) as (row, i):
        for part, source in enumerate(sources):
            k.store("out", k.raw(source, row * dim + i), (row * len(sources) + part) * dim + i)
    return k.function()


def _cpu(spec: KernelSpec, target: Any) -> Any:
    from tvm.script.ir_builder import tirx as T

    from llmc.compiler.targets.cpu.kernels import builder as b

    dim, buffers = int(spec.as_dict()["dim"]), _BUFFERS[spec.op]
    sources, full, tail = buffers[:-1], dim // b.WIDTH * b.WIDTH, dim % b.WIDTH
    kernel = b.Kernel.of(spec.symbol(), [(name, "float32") for name in buffers], target)
    with kernel as k, k.share(k.scalar(NUM_TOKENS)) as row:
        for part, source in enumerate(sources):
            start, to = b.let(row * dim), b.let((row * len(sources) + part) * dim)
            if full:
                with T.serial(full // b.WIDTH) as piece:
                    values = b.load_vector(k[source], start + piece * b.WIDTH)
                    b.store_vector(k["out"], values, to + piece * b.WIDTH)
            if tail:
                b.store_vector(k["out"], b.load_vector(k[source], start + full, tail), to + full, tail)
    return kernel.function()


_TEMPLATES: Mapping[str, Template] = {"reference": _reference, "cpu": _cpu}

GATHER_ROWS_LEAVING = OpDef(
    "gather_rows_leaving",
    {"x": Argument(2, F32), "index": Argument(1, I32), "states": Argument(2, F32)},
    lambda call: ((call.shapes["index"][0], call.shapes["x"][1]), F32[0]),
    _gather_rows_leaving,
    calls=("gather_rows_leaving", "gather_rows"),
    runs_on=lambda target: target.keeps_states,
    templates=_TEMPLATES,
)
BESIDE_STATES = OpDef(
    "beside_states",
    {"x": Argument(2, F32)},
    lambda call: ((call.shapes["x"][0], 2 * call.shapes["x"][1]), F32[0]),
    _beside_states,
    runs_on=lambda target: target.keeps_states,
    templates=_TEMPLATES,
)
READ_STATES = OpDef(
    "read_states",
    {"ids": Argument(1, I32)},
    lambda call: ((call.shapes["ids"][0], call.values["width"]), F32[0]),
    _read_states,
    runs_on=lambda target: target.keeps_states,
    templates=_TEMPLATES,
)
