"""spread_logits: from a drafting head's vocabulary to its model's; tokens that the head lacks cannot be drawn."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llmc.compiler.graph.commands import Site
from llmc.compiler.kernel_spec import KernelSpec
from llmc.compiler.ops.definition import F32, NUM_SAMPLES, Argument, GraphParams, KernelCall, OpDef, Template

_BUFFERS = ("x", "places", "out")
LACKING = -1e30
"""The logit of a token that the head lacks: finite, as samplers demand, and unlikely under any temperature or bias."""
_PIECE = 256
"""Columns that a task takes at once."""


def _kernels(site: Site, graph: GraphParams) -> list[KernelCall]:
    widths = site.attributes["widths"]
    return [KernelCall(KernelSpec.of("other", "spread_logits", dim=widths["x"], out=widths["places"]), _BUFFERS)]


def _sizes(spec: KernelSpec) -> tuple[int, int]:
    params = spec.as_dict()
    return int(params["dim"]), int(params["out"])


def _taken(place: Any, value: Any) -> Any:
    """`value`, or `LACKING` where there is no place."""
    from tvm.script.ir_builder import tirx as T

    return T.Select(place < 0, T.float32(LACKING), value)


def _reference(spec: KernelSpec) -> Any:
    from tvm.script.ir_builder import tirx as T

    from llmc.compiler.targets.reference.kernels.frame import Frame, let

    dim, out = _sizes(spec)
    frame = Frame(spec.symbol(), dict.fromkeys(_BUFFERS, "f32"))
    with frame as k, k.share_elements(k.scalar(NUM_SAMPLES), out) as (row, column):
        place = let(T.Cast("int32", k.raw("places", column)))
        k.store("out", _taken(place, k.raw("x", row * dim + let(T.max(place, 0)))), row * out + column)
    return k.function()


def _cpu(spec: KernelSpec, target: Any) -> Any:
    from tvm.script.ir_builder import tirx as T

    from llmc.compiler.targets.cpu.kernels import builder as b

    dim, out = _sizes(spec)
    pieces = b.ceil_div(out, _PIECE)
    kernel = b.Kernel.of(spec.symbol(), [(name, "float32") for name in _BUFFERS], target)
    with kernel as k, k.share(k.scalar(NUM_SAMPLES) * pieces) as piece:
        row, first = b.let(T.truncdiv(piece, pieces)), b.let(T.truncmod(piece, pieces) * _PIECE)
        with T.serial(first, T.min(first + _PIECE, out)) as column:
            place = b.let(T.Cast("int32", k["places"][column]))
            # Kept apart: TVM drops the bound where the condition implies it, and the load is not conditional.
            source = b.let(T.max(place, 0))
            value = _taken(place, k["x"][row * dim + source])
            T.buffer_store(k["out"], value, [row * out + column])
    return kernel.function()


_TEMPLATES: Mapping[str, Template] = {"reference": _reference, "cpu": _cpu}

SPREAD_LOGITS = OpDef(
    "spread_logits",
    {"x": Argument(2, F32), "places": Argument(1, F32)},
    lambda call: ((call.shapes["x"][0], call.shapes["places"][0]), F32[0]),
    _kernels,
    runs_on=lambda target: target.keeps_states,
    templates=_TEMPLATES,
)
