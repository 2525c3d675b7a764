"""Specs of the linear kernels."""

from __future__ import annotations

from llmc.compiler.kernel_spec import KernelSpec
from llmc.quantize import WeightFormat


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
    """y [rows, n] = x [rows, k] by a weight [n, k] of the same dtype. rows: the scalar that counts valid ones.

    gated: the weight's rows are gate's, then up's, and y [rows, n / 2] is silu(gate) · up (see `sums.GATED`).
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
    """As `linear_spec`, of a weight stored in `format`. act_dtype: f32, bf16 or i8."""
    return KernelSpec.of(
        "linear",
        "linear_quant",
        n=n,
        k=k,
        row_tile=row_tile,
        act_dtype=act_dtype,
        bits=format.bits,
        group_size=format.group_size,
        asymmetric=format.asymmetric and not format.steps,  # of steps all zero points are stored
        steps=format.steps,
        bias=bias,
        residual=residual,
        rows=rows,
        gated=gated,
    )
