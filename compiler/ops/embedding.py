"""embedding: rows of a matrix by token id.

first: the matrix has the rows of this token and of those behind it. Rows of other tokens are −0.0: another rank has
them, and the sum over ranks has their bits.
"""

from __future__ import annotations

from llmc.compiler.graph.commands import Site
from llmc.compiler.kernel_spec import KernelSpec
from llmc.compiler.ops.adapters import adapter_scratch, with_adapters
from llmc.compiler.ops.definition import (
    ANY_FLOAT,
    F32,
    I32,
    Argument,
    GraphParams,
    KernelCall,
    OpDef,
    weight_buffers,
    weight_format,
)

_ARGUMENTS = {"ids": Argument(1, I32), "weight": Argument(2, ANY_FLOAT), "first": Argument(1, F32)}


def _part(site: Site) -> list[str]:
    return ["first"] if "first" in site.tensors else []


def _embedding(site: Site, graph: GraphParams) -> list[KernelCall]:
    vocab, dim = site.attributes["weight_shapes"]["weight"]
    spec = KernelSpec.of(
        "embedding",
        "embedding",
        dim=dim,
        vocab=vocab,
        weight_dtype=graph.act_dtype,
        packed="weight" in site.attributes["shared"],
        **{name: True for name in _part(site)},
        **graph.target.weight_params(),
    )
    return with_adapters(site, graph, [KernelCall(spec, ("ids", "weight", *_part(site), "out"))])


def _embedding_quant(site: Site, graph: GraphParams) -> list[KernelCall]:
    vocab, dim = site.attributes["weight_shapes"]["weight"]
    spec = KernelSpec.of(
        "embedding",
        "embedding_quant",
        dim=dim,
        vocab=vocab,
        **{name: True for name in _part(site)},
        **graph.target.weight_params(),
        **weight_format(site).kernel_params(),
    )
    return with_adapters(site, graph, [KernelCall(spec, ("ids", *weight_buffers(site), *_part(site), "out"))])


EMBEDDING = OpDef(
    "embedding",
    _ARGUMENTS,
    lambda call: ((call.shapes["ids"][0], call.shapes["weight"][1]), F32[0]),
    _embedding,
    quantized="embedding_quant",
    quantized_calls=("embedding_quant",),
    scratch_parts=adapter_scratch,
)
EMBEDDING_QUANT = OpDef(
    "embedding_quant", _ARGUMENTS, EMBEDDING.result, _embedding_quant, scratch_parts=adapter_scratch, traced=False
)
