"""expert_quantize: quantizes the rows of every expert in use to int8, for a linear layer with integer sums."""

from __future__ import annotations

import tvm

from llmc.compiler.kernel_spec import KernelSpec
from llmc.compiler.targets.cpu.kernels import builder as b
from llmc.compiler.targets.cpu.kernels import quantize_rows
from llmc.compiler.targets.cpu.kernels.expert_calls import INDEX, Strides, for_each_expert, one_expert
from llmc.compiler.targets.cpu.target import Target


def _of_one(spec: KernelSpec, tile: int) -> KernelSpec:
    return one_expert(spec, "quantize_rows", tile)


def buffers(spec: KernelSpec) -> tuple[str, ...]:
    return ("x", INDEX, "out")


def build(spec: KernelSpec, target: Target) -> tvm.IRModule:
    p = spec.as_dict()
    dim, act = int(p["dim"]), str(p["act_dtype"])
    rows = quantize_rows.RowQuantizer(dim, _of_one(spec, 1))
    strides = {"x": 4 * b.ceil_div(dim, b.lanes_of(act)), "out": 4 * (rows.words + 1 + rows.groups)}
    dtypes = {"x": b.word_dtype(act), INDEX: "int32", "out": "int32"}
    return for_each_expert(
        spec,
        target,
        [(name, dtypes[name]) for name in buffers(spec)],
        lambda tile, name: quantize_rows.part(_of_one(spec, tile), target, name),
        Strides(strides, {}),
    )
