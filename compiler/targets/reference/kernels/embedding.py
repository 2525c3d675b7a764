"""embedding and embedding_quant: rows of a matrix by token id."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from llmc.compiler.kernel_spec import KernelSpec
from llmc.compiler.targets.reference.kernels.frame import NUM_TOKENS, Expr, Frame, let, row_width, when
from llmc.compiler.targets.reference.kernels.matrices import matrix_of


def _first(spec: KernelSpec) -> dict[str, str]:
    return {"first": "f32"} if spec.as_dict().get("first") else {}


@contextmanager
def _elements(k: Frame, spec: KernelSpec) -> Iterator[tuple[Expr, Expr, Expr]]:
    """A loop over elements: (row, element, its row of the table). Of a part of the vocabulary, rows of other tokens are
    −0.0."""
    p = spec.as_dict()
    vocab, dim = int(p["vocab"]), int(p["dim"])
    with k.share_elements(k.scalar(NUM_TOKENS), dim) as (row, i):
        if not p.get("first"):
            # an invalid id reads some row, never past the table
            yield row, i, let(T.max(T.min(k.raw("ids", row), vocab - 1), 0))
            return
        place = let(k.raw("ids", row) - T.Cast("int32", k.raw("first", 0)))
        held = T.And(place >= 0, place < vocab)
        with when(T.Not(held)):
            k.store("out", T.reinterpret("float32", T.int32(-(1 << 31))), row * dim + i)
        with when(held):
            yield row, i, place


def embedding(spec: KernelSpec) -> tirx.PrimFunc:
    p = spec.as_dict()
    dim, dtype = int(p["dim"]), str(p["weight_dtype"])
    # A weight shared with the output projection has rows padded to whole words.
    stride = row_width(dim, dtype) if p["packed"] else dim
    buffers = {"ids": "i32", "weight": dtype, **_first(spec), "out": "f32"}
    with Frame(spec.symbol(), buffers) as k, _elements(k, spec) as (row, i, token):
        k.store("out", k.load("weight", token * stride + i), row * dim + i)
    return k.function()


def embedding_quant(spec: KernelSpec) -> tirx.PrimFunc:
    p = spec.as_dict()
    dim = int(p["dim"])
    matrix = matrix_of(p, dim)
    buffers = {"ids": "i32", **matrix.operands(), **_first(spec), "out": "f32"}
    with Frame(spec.symbol(), buffers) as k, _elements(k, spec) as (row, i, token):
        k.store("out", matrix.value(k, token, i), row * dim + i)
    return k.function()
