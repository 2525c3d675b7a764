"""placed_rows: rows of the states buffer take the place of tokens' rows."""

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


def _placed_rows(site: Site, graph: GraphParams) -> list[KernelCall]:
    spec = KernelSpec.of("other", "placed_rows", dim=site.attributes["widths"]["x"])
    return [KernelCall(spec, ("x", "ids", BufferSource.STATES, "out"))]


def _reference(spec: KernelSpec) -> Any:
    from llmc.compiler.targets.reference.kernels.frame import Frame, when

    dim = int(spec.as_dict()["dim"])
    frame = Frame(spec.symbol(), {"x": "f32", "ids": "i32", "states": "f32", "out": "f32"})
    with frame as k, k.share_elements(k.scalar(NUM_TOKENS), dim) as (row, i):
        # Branches, not a choice of two values: rows of tokens have no states, which may be anything.
        with when(k.raw("ids", row) < 0):
            k.store("out", k.raw("states", row * dim + i), row * dim + i)
        with when(k.raw("ids", row) >= 0):
            k.store("out", k.raw("x", row * dim + i), row * dim + i)
    return k.function()


def _cpu(spec: KernelSpec, target: Any) -> Any:
    from tvm.script.ir_builder import tirx as T

    from llmc.compiler.targets.cpu.kernels import builder as b

    dim = int(spec.as_dict()["dim"])
    full, tail = dim // b.WIDTH * b.WIDTH, dim % b.WIDTH
    buffers = [("x", "float32"), ("ids", "int32"), ("states", "float32"), ("out", "float32")]
    kernel = b.Kernel.of(spec.symbol(), buffers, target)

    def copy(source: b.Expr, start: b.Expr) -> None:
        if full:
            with T.serial(full // b.WIDTH) as piece:
                at = start + piece * b.WIDTH
                b.store_vector(k["out"], b.load_vector(source, at), at)
        if tail:
            b.store_vector(k["out"], b.load_vector(source, start + full, tail), start + full, tail)

    with kernel as k, k.share(k.scalar(NUM_TOKENS)) as row:
        token, start = b.let(k["ids"][row]), b.let(row * dim)
        with b.when(token < 0):
            copy(k["states"], start)
        with b.when(token >= 0):
            copy(k["x"], start)
    return kernel.function()


_TEMPLATES: Mapping[str, Template] = {"reference": _reference, "cpu": _cpu}

PLACED_ROWS = OpDef(
    "placed_rows",
    {"x": Argument(2, F32), "ids": Argument(1, I32)},
    lambda call: (tuple(call.shapes["x"]), F32[0]),
    _placed_rows,
    runs_on=lambda target: target.keeps_states,
    templates=_TEMPLATES,
)
