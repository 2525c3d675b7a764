"""linear and linear_quant: sums over ascending K, then bias and residual, or an activation."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from llmc.compiler.kernel_spec import KernelSpec, Param
from llmc.compiler.targets.reference.kernels.frame import Cell, Expr, Frame, let, row_width, when
from llmc.compiler.targets.reference.kernels.functions import ACTIVATIONS, sigmoid
from llmc.compiler.targets.reference.kernels.matrices import matrix_of
from llmc.compiler.targets.reference.kernels.matrix import IntegerMatrix
from llmc.compiler.targets.reference.kernels.rows_int8 import Int8Rows

Dot = Callable[[Frame, Expr, Expr], Expr]
"""The dot product of a row of x and a row of the weight."""


def linear(spec: KernelSpec) -> tirx.PrimFunc:
    p = spec.as_dict()
    width, dtype = int(p["k"]), str(p["weight_dtype"])
    stride = row_width(width, dtype)

    def dot(k: Frame, row: Expr, column: Expr) -> Expr:
        total = Cell(T.float32(0.0))
        with T.serial(width) as i:
            total.set(total.get() + k.load("x", row * stride + i) * k.load("weight", column * stride + i))
        return total.get()

    return linear_of(spec, {"x": str(p["act_dtype"]), "weight": dtype}, dot)


def linear_quant(spec: KernelSpec) -> tirx.PrimFunc:
    p = spec.as_dict()
    width, act = int(p["k"]), str(p["act_dtype"])
    matrix = matrix_of(p, width)
    rows = Int8Rows(width, matrix.scales)

    def dot_of_floats(k: Frame, row: Expr, column: Expr) -> Expr:
        stride, total = row_width(width, act), Cell(T.float32(0.0))
        with T.serial(width) as i:
            total.set(total.get() + k.load("x", row * stride + i) * matrix.value(k, column, i))
        return total.get()

    def dot_of_int8(k: Frame, row: Expr, column: Expr) -> Expr:
        """The dot product with int8 activations: exact integer sums within each scale group."""
        assert isinstance(matrix, IntegerMatrix)
        length = width if matrix.scales == 1 else matrix.group_size
        total = Cell(T.float32(0.0))
        with T.serial(matrix.scales) as group:
            exact, first = Cell(T.int32(0), "int32"), let(group * length)
            with T.serial(first, let(T.min(first + length, width))) as i:
                exact.set(exact.get() + rows.number(k, "x", row, i) * matrix.whole(k, column, i))
            total.set(total.get() + T.Cast("float32", exact.get()) * matrix.scale(k, column, group))
        return total.get() * rows.scale(k, "x", row)

    return linear_of(spec, {"x": act, **matrix.operands()}, dot_of_int8 if act == "i8" else dot_of_floats)


def activated_dtype(p: Mapping[str, Param]) -> str:
    """Dtype of the packed result of a layer with an activation; empty: float32 sums are the result."""
    return str(p["gated"]) or str(p.get("activated", ""))


def activated(p: Mapping[str, Param], x: Expr, up: Expr | None = None) -> Expr:
    """f(x), or f(x) · up of a gated layer, or with gate_limit the gate of `expert_ops.experts`."""
    activation, limit = ACTIVATIONS[str(p.get("activation", "silu"))], float(p.get("gate_limit", 0.0))
    if up is None or not limit:
        return activation(x) if up is None else activation(x) * up
    most, least = T.float32(limit), T.float32(-limit)
    gate = let(T.Select(x > most, most, x), "float32")
    up = let(T.Select(up > most, most, T.Select(up < least, least, up)), "float32")
    return gate * sigmoid(gate * T.float32(float(p["gate_gain"]))) * (up + T.float32(1.0))


def linear_of(spec: KernelSpec, inputs: dict[str, str], dot: Dot) -> tirx.PrimFunc:
    """The kernel of a linear layer with dot products by `dot`. inputs: dtypes of x, the weight and its parts.

    For experts, the index gives each row's expert, whose part of the weight is used (`experts.py`).
    """
    p = spec.as_dict()
    n, act, of_experts = int(p["n"]), activated_dtype(p), "experts" in p
    optional = [name for name in ("bias", "residual") if p.get(name)]
    index = {"index": "i32"} if of_experts else {}
    buffers = {**inputs, **dict.fromkeys(optional, "f32"), **index, "out": act or "f32"}
    columns = n // 2 if p["gated"] else n
    stride = row_width(columns, act) if act else n
    with Frame(spec.symbol(), buffers) as k:
        rows = let(k.raw("index", T.int32(0))) if of_experts else k.scalar(int(p["rows"]))

        def value(row: Expr, column: Expr) -> Expr:
            total = let(dot(k, row, column), "float32")
            if p["bias"]:
                total = let(total + k.raw("bias", column), "float32")
            return total

        # Columns outermost: a weight row is read once for all rows of x.
        with k.share(columns) as column, T.serial(rows) as row:
            first = let(k.raw("index", 1 + row) * n + column) if of_experts else column
            if act:
                parts = [value(row, first + start) for start in range(0, n, columns)]
                k.store("out", activated(p, *parts), row * stride + column)
                if stride > columns:
                    with when(column == columns - 1):
                        k.store("out", T.float32(0.0), row * stride + columns)
            else:
                total = value(row, first)
                if p.get("residual"):
                    total = total + k.raw("residual", row * n + column)
                k.store("out", total, row * stride + column)
    return k.function()


LINEARS: dict[str, Callable[[KernelSpec], tirx.PrimFunc]] = {
    "expert_linear": linear,
    "expert_linear_quant": linear_quant,
}
"""Builders of expert linear layers, by op."""
