"""embedding: rows of the table as float32, from a row-major table or from the packed weight of a tied lm_head."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from llmc.compiler.kernel_spec import KernelSpec
from llmc.compiler.targets.cpu.kernels import builder as b
from llmc.compiler.targets.cpu.target import Target


def buffers(spec: KernelSpec) -> tuple[str, ...]:
    return ("ids", "weight", *part_buffers(spec), "out")


def part_buffers(spec: KernelSpec) -> tuple[str, ...]:
    """`first`, if the table has a part of the vocabulary."""
    return ("first",) if spec.as_dict().get("first") else ()


@contextmanager
def rows_of_tokens(k: b.Kernel, spec: KernelSpec) -> Iterator[tuple[b.Expr, b.Expr]]:
    """A loop over the rows that a task writes: (row, its row of the table). Of a part of the vocabulary, rows of other
    tokens are written here."""
    p = spec.as_dict()
    vocab, dim = int(p["vocab"]), int(p["dim"])
    with k.share(k.scalar(int(p.get("rows", 0)))) as row:
        if not p.get("first"):
            # an invalid id reads some row, never past the table
            yield row, b.let(T.max(T.min(k["ids"][row], vocab - 1), 0))
            return
        place = b.let(k["ids"][row] - T.Cast("int32", k["first"][0]))
        held = T.And(place >= 0, place < vocab)
        with b.when(T.Not(held)), T.serial(dim) as i:
            b.store(k["out"], T.reinterpret("float32", T.int32(-(1 << 31))), row * dim + i)  # −0.0
        with b.when(held):
            yield row, place


def build(spec: KernelSpec, target: Target) -> tirx.PrimFunc:
    p = spec.as_dict()
    dim, dtype = int(p["dim"]), str(p["weight_dtype"])
    packed, columns = bool(p["packed"]), int(p.get("panel_columns", target.panel_columns))
    lanes = b.lanes_of(dtype)
    weight_dtype = b.word_dtype(dtype) if packed else b.TIR_DTYPE[dtype]
    dtypes = {"ids": "int32", "weight": weight_dtype}
    kernel = b.Kernel.of(spec.symbol(), [(name, dtypes.get(name, "float32")) for name in buffers(spec)], target)
    with kernel as k:
        weight, out = k["weight"], k["out"]
        with rows_of_tokens(k, spec) as (row, token):
            if packed:
                words = b.ceil_div(dim, lanes)
                base = T.truncdiv(token, columns) * (words * columns) + T.truncmod(token, columns)
                with T.serial(dim // lanes) as word:
                    value = weight[base + word * columns]
                    if lanes == 1:
                        b.store(out, value, row * dim + word)
                    else:
                        for half in range(lanes):
                            b.store(out, b.half_of(dtype, value, half), row * dim + word * 2 + half)
                if dim % lanes:
                    last = weight[base + (words - 1) * columns]
                    b.store(out, b.half_of(dtype, last, 0), row * dim + dim - 1)
            else:
                full, tail = dim // b.WIDTH, dim % b.WIDTH
                with T.serial(full) as step:
                    at = step * b.WIDTH
                    value = b.load_vector(weight, token * dim + at, b.WIDTH, dtype)
                    b.store_vector(out, value, row * dim + at)
                if tail:
                    at = full * b.WIDTH
                    value = b.load_vector(weight, token * dim + at, tail, dtype)
                    b.store_vector(out, value, row * dim + at, tail)
    return kernel.function()
