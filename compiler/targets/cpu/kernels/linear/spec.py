"""Specs of the linear kernels, and the problem of a spec."""

from __future__ import annotations

from llmc.compiler.kernel_spec import KernelSpec, Param
from llmc.compiler.ops import linear as ops
from llmc.compiler.targets.cpu.kernels.linear.micro.base import B16X2, S16X2
from llmc.compiler.targets.cpu.kernels.linear.problem import Problem, operand_names
from llmc.compiler.targets.cpu.kernels.linear.readers import quantized_reader
from llmc.compiler.targets.cpu.target import Target
from llmc.quantize import WeightFormat
from llmc.quantize.formats.registry import format_of_kernel


def linear_spec(n: int, k: int, row_tile: int, dtype: str, **params: Param) -> KernelSpec:
    """As `ops.linear.linear_spec`."""
    return ops.linear_spec(dtype, n=n, k=k, row_tile=row_tile, **params)


def linear_quant_spec(
    n: int, k: int, row_tile: int, act_dtype: str, format: WeightFormat, **params: Param
) -> KernelSpec:
    """As `ops.linear.linear_quant_spec`."""
    return ops.linear_quant_spec(act_dtype, format, n=n, k=k, row_tile=row_tile, **params)


def buffers(spec: KernelSpec) -> tuple[str, ...]:
    """Names of the operands in order."""
    p = spec.as_dict()
    planes = format_of_kernel(p).planes(int(p["k"])) if spec.op == "linear_quant" else ()
    return operand_names(spec, [plane.name for plane in planes])


def problem_of(spec: KernelSpec, target: Target) -> Problem:
    """The problem. Raises KernelSpecError for a spec without layout, QuantizeError for an unknown format."""
    format = format_of_kernel(spec.as_dict()) if spec.op == "linear_quant" else None
    reader = quantized_reader(format) if format else None
    kinds = reader.units_of if reader else {}
    return Problem(spec, target, format, in_pairs=S16X2 in kinds, in_bf16=B16X2 in kinds)
