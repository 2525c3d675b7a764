"""Specs of the linear kernels, and the problem of a spec."""

from __future__ import annotations

from llmc.compiler.kernel_spec import KernelSpec
from llmc.compiler.targets.cpu.kernels.linear.micro.base import B16X2, S16X2
from llmc.compiler.targets.cpu.kernels.linear.problem import Problem, operand_names
from llmc.compiler.targets.cpu.kernels.linear.readers import quantized_reader
from llmc.compiler.targets.cpu.target import Target
from llmc.quantize import WeightFormat
from llmc.quantize.formats.registry import format_of_kernel


def linear_spec(
    n: int,
    k: int,
    row_tile: int,
    dtype: str,
    *,
    bias: bool = False,
    residual: bool = False,
    rows: int = 0,
    gated: str = "",
) -> KernelSpec:
    """y [rows, n] = x [rows, k] times a weight [n, k] of the same dtype. rows: the scalar with the number of valid
    rows.

    gated: the weight contains gate's rows, then up's, and y [rows, n / 2] is silu(gate) · up (see `gate.GATED`).
    """
    return KernelSpec.of(
        "linear",
        "linear",
        n=n,
        k=k,
        row_tile=row_tile,
        act_dtype=dtype,
        weight_dtype=dtype,
        bias=bias,
        residual=residual,
        rows=rows,
        gated=gated,
    )


def linear_quant_spec(
    n: int,
    k: int,
    row_tile: int,
    act_dtype: str,
    format: WeightFormat,
    *,
    bias: bool = False,
    residual: bool = False,
    rows: int = 0,
    gated: str = "",
) -> KernelSpec:
    """Like `linear_spec`, with a weight stored in `format`. act_dtype: f32, bf16, f16 or i8."""
    return KernelSpec.of(
        "linear",
        "linear_quant",
        n=n,
        k=k,
        row_tile=row_tile,
        act_dtype=act_dtype,
        **format.kernel_params(),
        bias=bias,
        residual=residual,
        rows=rows,
        gated=gated,
    )


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
