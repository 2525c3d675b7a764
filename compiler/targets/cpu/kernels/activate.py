"""activate: f(x) of plain rows, or f(gate) · up of rows that hold both side by side, as a packed activation."""

from __future__ import annotations

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from llmc.compiler.kernel_spec import KernelSpec
from llmc.compiler.targets.cpu.kernels import builder as b
from llmc.compiler.targets.cpu.kernels.ir import vector
from llmc.compiler.targets.cpu.kernels.ir.activations import ACTIVATIONS
from llmc.compiler.targets.cpu.target import Target

_BLOCK = 256  # columns per unit of work, so that one row tile occupies several tasks


def buffers(spec: KernelSpec) -> tuple[str, ...]:
    return ("x", "out")


def build(spec: KernelSpec, target: Target) -> tirx.PrimFunc:
    p = spec.as_dict()
    dim, row_tile, act = int(p["dim"]), int(p["row_tile"]), str(p["act_dtype"])
    words, blocks, tail = b.ceil_div(dim, b.lanes_of(act)), b.ceil_div(dim, _BLOCK), dim % b.WIDTH
    activation, parts = str(p["activation"]), 2 if p["gated"] else 1
    helpers = vector.helpers(target.mcpu, puts=tuple((act, row_tile, n) for n in (b.WIDTH, tail) if n))
    helpers += ACTIVATIONS[activation]() if activation else ""
    kernel = b.Kernel(spec.symbol(), [("x", "float32"), ("out", b.word_dtype(act))], helpers)
    with kernel as k:
        rows = k.scalar(int(p["rows"]))
        tiles = b.let(T.truncdiv(rows + (row_tile - 1), row_tile))
        with k.share(b.let(tiles * blocks)) as unit:
            tile, first = b.let(T.truncdiv(unit, blocks)), b.let(T.truncmod(unit, blocks) * _BLOCK)
            end = b.let(T.min(first + _BLOCK, dim))
            with T.serial(b.let(tile * row_tile), b.let(T.min((tile + 1) * row_tile, rows))) as row:
                base = b.let(b.packed_position(row, row_tile, words))

                def emit(column: b.Expr, count: int) -> None:
                    at = b.let(row * (parts * dim) + column)
                    value = b.load_vector(k["x"], at, count)
                    value = b.call(activation, value) if activation else value
                    if p["gated"]:
                        value = b.call("mul", value, b.load_vector(k["x"], at + dim, count))
                    b.put(k["out"], value, base, column, act, row_tile, count)

                with T.serial(T.truncdiv(end - first, b.WIDTH)) as v:
                    emit(b.let(first + v * b.WIDTH), b.WIDTH)
                if tail:
                    with b.when(end == dim):
                        emit(b.let(T.int32(dim - tail)), tail)
    return kernel.function()
