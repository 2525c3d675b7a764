"""embedding and embedding_quant: rows of a matrix by token id."""

from __future__ import annotations

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from llmc.compiler.kernel_spec import KernelSpec
from llmc.compiler.targets.reference.kernels.frame import NUM_TOKENS, Frame, let, row_width
from llmc.compiler.targets.reference.kernels.matrices import matrix_of


def embedding(spec: KernelSpec) -> tirx.PrimFunc:
    p = spec.as_dict()
    dim, vocab, dtype = int(p["dim"]), int(p["vocab"]), str(p["weight_dtype"])
    # A weight shared with the output projection has rows padded to whole words.
    stride = row_width(dim, dtype) if p["packed"] else dim
    with Frame(spec.symbol(), {"ids": "i32", "weight": dtype, "out": "f32"}) as k, k.share(k.scalar(NUM_TOKENS)) as row:
        token = let(T.max(T.min(k.raw("ids", row), vocab - 1), 0))  # an invalid id reads some row, never past the table
        with T.serial(dim) as i:
            k.store("out", k.load("weight", token * stride + i), row * dim + i)
    return k.function()


def embedding_quant(spec: KernelSpec) -> tirx.PrimFunc:
    p = spec.as_dict()
    dim, vocab = int(p["dim"]), int(p["vocab"])
    matrix = matrix_of(p, dim)
    with (
        Frame(spec.symbol(), {"ids": "i32", **matrix.operands(), "out": "f32"}) as k,
        k.share(k.scalar(NUM_TOKENS)) as row,
    ):
        token = let(T.max(T.min(k.raw("ids", row), vocab - 1), 0))
        with T.serial(dim) as i:
            k.store("out", matrix.value(k, token, i), row * dim + i)
    return k.function()
