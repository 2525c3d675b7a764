"""expert_linear and expert_linear_quant: the linear kernel of every expert in use, over its own rows and weight."""

from __future__ import annotations

from math import prod

import tvm

from llmc.compiler.kernel_spec import KernelSpec
from llmc.compiler.targets.cpu.kernels import builder as b
from llmc.compiler.targets.cpu.kernels.expert_calls import INDEX, Strides, for_each_expert, one_expert
from llmc.compiler.targets.cpu.kernels.linear import kernel as linear
from llmc.compiler.targets.cpu.kernels.linear.plan import operands
from llmc.compiler.targets.cpu.kernels.linear.problem import Problem
from llmc.compiler.targets.cpu.kernels.linear.spec import problem_of
from llmc.compiler.targets.cpu.target import Target

_OPS = {"expert_linear": "linear", "expert_linear_quant": "linear_quant"}


def _of_one(spec: KernelSpec, tile: int) -> KernelSpec:
    return one_expert(spec, _OPS[spec.op], tile, residual=False)


def buffers(spec: KernelSpec) -> tuple[str, ...]:
    *inputs, out = linear.buffers(_of_one(spec, 1))
    return (*inputs, INDEX, out)


def build(spec: KernelSpec, target: Target) -> tvm.IRModule:
    problem = problem_of(_of_one(spec, 1), target)
    dtypes = {**dict(problem.buffer_dtypes()), INDEX: "int32"}
    return for_each_expert(
        spec,
        target,
        [(name, dtypes[name]) for name in buffers(spec)],
        lambda tile, name: linear.part(_of_one(spec, tile), target, name),
        _strides(problem),
    )


def _strides(p: Problem) -> Strides:
    """Strides of the buffers. p: the problem with row tiles of one row."""
    reader, _ = operands(p)
    panels = p.parts * p.panels
    y = b.ceil_div(p.width, b.lanes_of(p.activated)) if p.activated else p.n
    planes = {name: panels * plane.count * p.columns * plane.numpy_dtype.itemsize for name, plane in p.planes.items()}
    weight = prod((4, panels, reader.panel_words, p.columns))
    return Strides({"x": 4 * p.tile_words, "y": 4 * y}, {"w": weight, "bias": 4 * p.n, **planes})
