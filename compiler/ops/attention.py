"""paged_attention: attention of queries to their sequences' keys and values in the paged cache."""

from __future__ import annotations

from llmc.compiler.graph.commands import Site
from llmc.compiler.kernel_spec import KernelSpec, Param
from llmc.compiler.ops.definition import F32, I32, Argument, BufferSource, GraphParams, KernelCall, OpDef


def _paged_attention(site: Site, graph: GraphParams) -> list[KernelCall]:
    a, segments = site.attributes, graph.shape.segments
    causal = bool(a.get("causal", True))
    both = {
        "num_heads": a["num_heads"],
        "head_dim": a["head_dim"],
        "window": a["window"],
        "act_dtype": graph.act_dtype,
        "block_size": graph.block_size,
        "segments": segments,
        **graph.row_params(),
        **({"chunk": a["chunk"]} if a.get("chunk", 0) else {}),
        **({"sinks": True} if "sinks" in site.tensors else {}),
        **({} if causal else {"both_ways": True}),
    }
    spec = KernelSpec.of(
        "attention",
        "paged_attention",
        num_kv_heads=a["num_kv_heads"],
        scale=float(a["scale"]),
        kv_dtype=graph.kv_dtype,
        **both,
        **_shape_of_scores(site),
        **graph.target.attention_params(graph.shape),
    )
    # With two-sided attention a kernel must know where the context ends.
    ends = () if causal else ("context_lens",)
    inputs = ("q", "block_tables", "token_seq", "positions", *ends, BufferSource.K_POOL, BufferSource.V_POOL)
    slopes, sinks = (tuple(n for n in (name,) if n in site.tensors) for name in ("slopes", "sinks"))
    if not segments:
        return [KernelCall(spec, (*inputs, *slopes, *sinks, "out"))]
    merge = KernelSpec.of("attention", "merge_attention", **both)
    return [
        KernelCall(spec, (*inputs, *slopes, *sinks, BufferSource.SCRATCH, "out")),
        KernelCall(merge, ("positions", *(("token_seq", *ends) if ends else ()), BufferSource.SCRATCH, *sinks, "out")),
    ]


def _shape_of_scores(site: Site) -> dict[str, Param]:
    """Parameters of the score adjustments. Those a model lacks are omitted, so that its kernels' specs stay
    unchanged."""
    a, params = site.attributes, dict[str, Param]()
    if cap := float(a.get("score_cap", 0.0)):
        params["score_cap"] = cap
    if "slopes" in site.tensors:
        params["bias"] = "rounded" if a.get("rounded_bias", False) else "distance"
    return params


def _scratch_bytes(site: Site, graph: GraphParams) -> int:
    a, shape = site.attributes, graph.shape
    return graph.target.attention_scratch_bytes(shape.tokens, a["num_heads"], a["head_dim"], shape.segments)


PAGED_ATTENTION = OpDef(
    "paged_attention",
    {
        "q": Argument(2, F32),
        "block_tables": Argument(2, I32),
        "context_lens": Argument(1, I32),
        "query_start": Argument(1, I32),
        "token_seq": Argument(1, I32),
        "positions": Argument(1, I32),
        "slopes": Argument(1, F32),
        "sinks": Argument(1, F32),
    },
    lambda call: ((call.shapes["q"][0], call.packed_width(call.shapes["q"][1])), call.act.long_name),
    _paged_attention,
    packed_result=True,
    scratch_bytes=_scratch_bytes,
)
