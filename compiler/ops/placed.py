"""placed_rows: rows of the states buffer take the place of tokens' rows, or are added to them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
    a = site.attributes
    spec = KernelSpec.of(
        "other", "placed_rows", dim=a["widths"]["x"], width=a["width"], first=a["first"], added=bool(a["added"])
    )
    return [KernelCall(spec, ("x", "ids", BufferSource.STATES, "out"))]


def _reference(spec: KernelSpec) -> Any:
    from llmc.compiler.targets.reference.kernels.frame import Frame, let, when

    p = spec.as_dict()
    dim = int(p["dim"])
    frame = Frame(spec.symbol(), {"x": "f32", "ids": "i32", "states": "f32", "out": "f32"})
    with frame as k, k.share_elements(k.scalar(NUM_TOKENS), dim) as (row, i):
        at = let(row * dim + i)
        # Branches, not a choice of two values: rows of tokens have no states, which may be anything.
        with when(k.raw("ids", row) < 0):
            placed = k.raw("states", row * int(p["width"]) + int(p["first"]) + i)
            k.store("out", k.raw("x", at) + placed if p["added"] else placed, at)
        with when(k.raw("ids", row) >= 0):
            k.store("out", k.raw("x", at), at)
    return k.function()


def _cpu(spec: KernelSpec, target: Any) -> Any:
    from tvm.script.ir_builder import tirx as T

    from llmc.compiler.targets.cpu.kernels import builder as b

    p = spec.as_dict()
    dim = int(p["dim"])
    buffers = [("x", "float32"), ("ids", "int32"), ("states", "float32"), ("out", "float32")]
    kernel = b.Kernel.of(spec.symbol(), buffers, target)

    def fill(start: b.Expr, value: Callable[[b.Expr, int], b.Expr]) -> None:
        """value: of `count` elements from one on."""
        full, tail = dim // b.WIDTH, dim % b.WIDTH
        if full:
            with T.serial(full) as piece:
                b.store_vector(k["out"], value(piece * b.WIDTH, b.WIDTH), start + piece * b.WIDTH)
        if tail:
            b.store_vector(k["out"], value(full * b.WIDTH, tail), start + full * b.WIDTH, tail)

    with kernel as k, k.share(k.scalar(NUM_TOKENS)) as row:
        token, start = b.let(k["ids"][row]), b.let(row * dim)
        states = b.let(row * int(p["width"]) + int(p["first"]))

        def own(at: b.Expr, count: int) -> b.Expr:
            return b.load_vector(k["x"], start + at, count)

        def placed(at: b.Expr, count: int) -> b.Expr:
            found = b.load_vector(k["states"], states + at, count)
            return own(at, count) + found if p["added"] else found

        with b.when(token < 0):
            fill(start, placed)
        with b.when(token >= 0):
            fill(start, own)
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
