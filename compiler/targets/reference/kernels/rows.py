"""rms_norm, activate, quantize_rows, permute_columns and gather_rows: kernels that work row by row."""

from __future__ import annotations

from collections.abc import Mapping

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from llmc.compiler.kernel_spec import KernelSpec, Param
from llmc.compiler.targets.reference.kernels.frame import Cell, Expr, Frame, let, row_width
from llmc.compiler.targets.reference.kernels.linear import activated
from llmc.compiler.targets.reference.kernels.rows_int8 import write_int8_row


def write_activation(k: Frame, row: Expr, width: int, dtype: str, i: Expr, value: Expr) -> None:
    """Writes element `i` of a row that a linear layer reads, and zeros the padding after the last one."""
    stride = row_width(width, dtype)
    k.store("out", value, row * stride + i)
    if stride > width:
        k.store("out", T.float32(0.0), row * stride + width)


def rms_norm(spec: KernelSpec) -> tirx.PrimFunc:
    p = spec.as_dict()
    dim, act = int(p["dim"]), str(p["act_dtype"])
    with Frame(spec.symbol(), {"x": "f32", "weight": "f32", "out": act}) as k, k.share(k.scalar(int(p["rows"]))) as row:
        squares = Cell(T.float32(0.0))
        with T.serial(dim) as i:
            squares.set(squares.get() + k.raw("x", row * dim + i) * k.raw("x", row * dim + i))
        mean = squares.get() / T.float32(dim)
        factor = let(T.float32(1.0) / T.sqrt(mean + T.float32(float(p["eps"]))), "float32")

        def value(i: Expr) -> Expr:
            return k.raw("x", row * dim + i) * factor * k.raw("weight", i)

        if act == "i8":
            write_int8_row(k, row, dim, p, value)
        else:
            with T.serial(dim) as i:
                write_activation(k, row, dim, act, i, value(i))
    return k.function()


def quantize_rows(spec: KernelSpec) -> tirx.PrimFunc:
    p = spec.as_dict()
    dim, act = int(p["dim"]), str(p["act_dtype"])
    stride, of_experts = row_width(dim, act), "experts" in p
    index = {"index": "i32"} if of_experts else {}
    with Frame(spec.symbol(), {"x": act, **index, "out": "i8"}) as k:
        # For experts, the index gives the number of rows.
        rows = let(k.raw("index", T.int32(0))) if of_experts else k.scalar(int(p["rows"]))
        with k.share(rows) as row:
            write_int8_row(k, row, dim, p, lambda i: k.load("x", row * stride + i))
    return k.function()


def permute_columns(spec: KernelSpec) -> tirx.PrimFunc:
    p = spec.as_dict()
    dim, act = int(p["dim"]), str(p["act_dtype"])
    stride = row_width(dim, act)
    with (
        Frame(spec.symbol(), {"x": act, "columns": "i32", "out": act}) as k,
        k.share_elements(k.scalar(int(p["rows"])), dim) as (row, i),
    ):
        write_activation(k, row, dim, act, i, k.load("x", row * stride + k.raw("columns", i)))
    return k.function()


def activated_element(k: Frame, p: Mapping[str, Param], row: Expr, i: Expr) -> Expr:
    """Element `i` of a row that `activate` makes."""
    dim, parts = int(p["dim"]), 2 if p["gated"] else 1
    at = let(row * (parts * dim) + i)
    name, value = str(p["activation"]), k.raw("x", at)
    if not name:
        return value
    return activated(p, value, k.raw("x", at + dim) if p["gated"] else None)


def activate(spec: KernelSpec) -> tirx.PrimFunc:
    p = spec.as_dict()
    dim, act = int(p["dim"]), str(p["act_dtype"])
    with (
        Frame(spec.symbol(), {"x": "f32", "out": act}) as k,
        k.share_elements(k.scalar(int(p["rows"])), dim) as (row, i),
    ):
        write_activation(k, row, dim, act, i, activated_element(k, p, row, i))
    return k.function()


def gather_rows(spec: KernelSpec) -> tirx.PrimFunc:
    p = spec.as_dict()
    dim, num_samples = int(p["dim"]), 2
    width = dim * int(p.get("count", 1))
    with (
        Frame(spec.symbol(), {"x": "f32", "index": "i32", "out": "f32"}) as k,
        k.share_elements(k.scalar(num_samples), width) as (row, i),
    ):
        k.store("out", k.raw("x", k.raw("index", row) * dim + i), row * width + i)
    return k.function()
