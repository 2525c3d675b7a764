"""held_experts: a token's chosen experts, by their indices among the experts that this rank holds.

Experts that other ranks hold have the number of held experts as their index (`expert_ops.held_experts`).
"""

from __future__ import annotations

from typing import Any

from llmc.compiler.graph.commands import Site
from llmc.compiler.kernel_spec import KernelSpec
from llmc.compiler.ops.definition import F32, I32, Argument, GraphParams, KernelCall, OpDef


def _kernels(site: Site, graph: GraphParams) -> list[KernelCall]:
    top_k = int(site.attributes["widths"]["chosen"]) // 2
    spec = KernelSpec.of("other", "held_experts", top_k=top_k, rows=graph.rows(site)["rows"])
    return [KernelCall(spec, ("chosen", "places", "out"))]


def _reference(spec: KernelSpec) -> Any:
    from tvm.script.ir_builder import tirx as T

    from llmc.compiler.targets.reference.kernels.frame import Frame

    p = spec.as_dict()
    top_k = int(p["top_k"])
    with (
        Frame(spec.symbol(), {"chosen": "i32", "places": "f32", "out": "i32"}) as k,
        k.share_elements(k.scalar(int(p["rows"])), top_k) as (row, j),
    ):
        at = row * (2 * top_k) + j
        k.put_raw("out", T.Cast("int32", k.raw("places", k.raw("chosen", at))), at)
        k.put_raw("out", k.raw("chosen", at + top_k), at + top_k)
    return k.function()


def _cpu(spec: KernelSpec, target: Any) -> Any:
    from tvm.script.ir_builder import tirx as T

    from llmc.compiler.targets.cpu.kernels import builder as b

    p = spec.as_dict()
    top_k = int(p["top_k"])
    buffers = [("chosen", "int32"), ("places", "float32"), ("out", "int32")]
    kernel = b.Kernel.of(spec.symbol(), buffers, target)
    with kernel as k, k.share(k.scalar(int(p["rows"]))) as row, T.serial(top_k) as j:
        at = b.let(row * (2 * top_k) + j)
        b.store(k["out"], T.Cast("int32", k["places"][k["chosen"][at]]), at)
        b.store(k["out"], k["chosen"][at + top_k], at + top_k)
    return kernel.function()


HELD_EXPERTS = OpDef(
    "held_experts",
    {"chosen": Argument(2, I32), "places": Argument(1, F32)},
    lambda call: (call.shapes["chosen"], I32[0]),
    _kernels,
    templates={"reference": _reference, "cpu": _cpu},
)
