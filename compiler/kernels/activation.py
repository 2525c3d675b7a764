"""silu_mul: silu(gate) * up, written as a packed activation, float or int8."""

from __future__ import annotations

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from llmc.compiler.kernels import builder as b
from llmc.compiler.kernels import vector_ir
from llmc.compiler.kernels.quantize_rows import RowQuantizer
from llmc.compiler.kernels.spec import KernelSpec
from llmc.compiler.targets.cpu import Target

_BLOCK = 256  # columns of one unit of work, so that one row feeds several tasks


def buffers(spec: KernelSpec) -> tuple[str, ...]:
    return ("gate_up", "out")


def build(spec: KernelSpec, target: Target) -> tirx.PrimFunc:
    p = spec.as_dict()
    dim, row_tile, act = int(p["dim"]), int(p["row_tile"]), str(p["act_dtype"])
    if act == "i8":
        return _quantized(spec, target)
    words = b.ceil_div(dim, b.lanes_of(act))
    blocks, tail = b.ceil_div(dim, _BLOCK), dim % b.WIDTH
    helpers = vector_ir.helpers(target.mcpu, puts=((act, row_tile, 16), (act, row_tile, max(tail, 1))))
    kernel = b.Kernel(spec.symbol(), [("gate_up", "float32"), ("out", b.word_dtype(act))], helpers)
    with kernel as k:
        gate_up, out = k["gate_up"], k["out"]
        with k.share(k.scalar(int(p.get("rows", 0))) * blocks) as unit:
            row, first = T.truncdiv(unit, blocks), T.truncmod(unit, blocks) * _BLOCK
            base = b.packed_position(row, row_tile, words)

            def emit(index: b.Expr, count: int) -> None:
                b.put(out, _gated(gate_up, row, dim, index, count), base, index, act, row_tile, count)

            steps = T.truncdiv(T.min(first + _BLOCK, dim) - first, b.WIDTH)
            with T.serial(steps) as step:
                emit(first + step * b.WIDTH, b.WIDTH)
            if tail:
                with b.when(first + _BLOCK >= dim):
                    emit(dim - tail, tail)
    return kernel.function()


def _gated(gate_up: b.Expr, row: b.Expr, dim: int, index: b.Expr, count: int) -> b.Expr:
    """`count` elements of a row of silu(gate) * up."""
    gate = b.load_vector(gate_up, row * (2 * dim) + index, count)
    up = b.load_vector(gate_up, row * (2 * dim) + dim + index, count)
    return b.call("mul", b.call("silu", gate), up)


def _quantized(spec: KernelSpec, target: Target) -> tirx.PrimFunc:
    """Whole rows: one scale needs them all."""
    p = spec.as_dict()
    dim = int(p["dim"])
    rows = RowQuantizer(dim, spec)
    helpers = vector_ir.helpers(target.mcpu) + rows.helpers()
    kernel = b.Kernel(spec.symbol(), [("gate_up", "float32"), ("out", "int32")], helpers)
    with kernel as k, k.share(k.scalar(int(p.get("rows", 0)))) as row:
        rows.begin()
        with T.serial(rows.full) as step:
            rows.keep(_gated(k["gate_up"], row, dim, step * b.WIDTH, b.WIDTH), step * b.WIDTH)
        if rows.tail:
            rows.keep(_gated(k["gate_up"], row, dim, rows.full * b.WIDTH, rows.tail), rows.full * b.WIDTH)
        rows.write(k["out"], row)
    return kernel.function()
