"""rank_sum: an item adds what the ranks have of one element, in their order, then bias and residual."""

from __future__ import annotations

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from llmc.compiler.kernel_spec import KernelSpec
from llmc.compiler.targets.reference.kernels.frame import Cell, Frame, let
from llmc.graphs_format import ADDS_BIAS, ADDS_RESIDUAL


def rank_sum(spec: KernelSpec) -> tirx.PrimFunc:
    """parts: [rows][ranks][width], as ranks gather them. out: [rows][width], as the runtime sums it up (FORMAT.md)."""
    p = spec.as_dict()
    ranks, width, adds = int(p["ranks"]), int(p["width"]), int(p["adds"])
    bias = {"bias": "f32"} if adds & ADDS_BIAS else {}
    residual = {"residual": "f32"} if adds & ADDS_RESIDUAL else {}
    buffers = {"parts": "f32", **bias, **residual, "out": "f32"}
    with Frame(spec.symbol(), buffers) as k, k.share(let(k.scalar(int(p["rows"])) * width)) as unit:
        row, column = let(T.truncdiv(unit, width)), let(T.truncmod(unit, width))
        first = let(row * (ranks * width) + column)
        total = Cell(k.raw("parts", first))
        with T.serial(ranks - 1) as behind:
            total.set(total.get() + k.raw("parts", first + (behind + 1) * width))
        if bias:
            total.set(total.get() + k.raw("bias", column))
        if residual:
            total.set(total.get() + k.raw("residual", unit))
        k.put_raw("out", total.get(), unit)
    return k.function()
