"""embedding: rows of the table as float32, from a row-major table or from the packed weight of a tied lm_head."""

from __future__ import annotations

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from llmc.compiler.kernel_spec import KernelSpec
from llmc.compiler.targets.cpu.kernels import builder as b
from llmc.compiler.targets.cpu.target import Target


def buffers(spec: KernelSpec) -> tuple[str, ...]:
    return ("ids", "weight", "out")


def build(spec: KernelSpec, target: Target) -> tirx.PrimFunc:
    p = spec.as_dict()
    dim, vocab, dtype = int(p["dim"]), int(p["vocab"]), str(p["weight_dtype"])
    packed, columns = bool(p["packed"]), int(p.get("panel_columns", target.panel_columns))
    lanes = b.lanes_of(dtype)
    weight_dtype = b.word_dtype(dtype) if packed else b.TIR_DTYPE[dtype]
    kernel = b.Kernel.of(spec.symbol(), [("ids", "int32"), ("weight", weight_dtype), ("out", "float32")], target)
    with kernel as k:
        ids, weight, out = k["ids"], k["weight"], k["out"]
        with k.share(k.scalar(int(p.get("rows", 0)))) as row:
            token = T.max(T.min(ids[row], vocab - 1), 0)  # an invalid id reads some row, never past the table
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
