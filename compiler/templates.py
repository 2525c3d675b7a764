"""Which kernel template an op site becomes in a graph, and the order of its buffers."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from llmc.compiler.config import CompileError
from llmc.compiler.dtypes import DTYPES
from llmc.compiler.graph import Site
from llmc.compiler.kernel_spec import KernelSpec
from llmc.compiler.targets.cpu.kernels.attention_split import partial_floats
from llmc.compiler.targets.cpu.kernels.linear_spec import linear_quant_spec, linear_spec
from llmc.compiler.targets.cpu.quant_packing import SCALE, STEP, ZERO
from llmc.compiler.targets.cpu.target import Target
from llmc.quantize import WeightFormat

NUM_TOKENS, NUM_SAMPLES = 0, 2
"""Indices into the kernel scalars: what bounds a kernel's rows."""


class BufferSource:
    """Buffers that are no tensor of the traced graph."""

    K_POOL = "<k_pool>"
    V_POOL = "<v_pool>"
    SCRATCH = "<scratch>"
    """Memory that only the commands of one op use."""
    SCALE, ZERO, STEP = SCALE, ZERO, STEP
    OF_WEIGHT = (SCALE, ZERO, STEP)
    """Stored beside the weight that the op reads, under its name and this."""


@dataclass(frozen=True)
class GraphParams:
    """What a template needs to know of the graph: tile of token rows and of sample rows, dtypes, block size in tokens.

    packed_embedding: the embedding shares its (packed) weight with the output projection. tokens: rows of the graph;
    segments: of the longest context where attention splits contexts, else 0.
    """

    target: Target
    row_tile: int
    sample_row_tile: int
    tokens: int
    segments: int
    max_model_len: int
    act_dtype: str
    kv_dtype: str
    block_size: int
    packed_embedding: bool


Buffers = tuple[str, ...]


def _rows(site: Site, graph: GraphParams) -> dict[str, int]:
    on_samples = bool(site.attributes["on_samples"])
    return {
        "rows": NUM_SAMPLES if on_samples else NUM_TOKENS,
        "row_tile": graph.sample_row_tile if on_samples else graph.row_tile,
    }


def _embedding(site: Site, graph: GraphParams) -> tuple[KernelSpec, Buffers]:
    vocab, dim = site.attributes["weight_shapes"]["weight"]
    spec = KernelSpec.of(
        "embedding",
        "embedding",
        dim=dim,
        vocab=vocab,
        weight_dtype=graph.act_dtype,
        packed=graph.packed_embedding,
        panel_columns=graph.target.panel_columns,
    )
    return spec, ("ids", "weight", "out")


def _embedding_quant(site: Site, graph: GraphParams) -> tuple[KernelSpec, Buffers]:
    vocab, dim = site.attributes["weight_shapes"]["weight"]
    spec = KernelSpec.of(
        "embedding",
        "embedding_quant",
        dim=dim,
        vocab=vocab,
        panel_columns=graph.target.panel_columns,
        **asdict(_weight_format(site)),
    )
    return spec, ("ids", "weight", BufferSource.SCALE, "out")


def _weight_format(site: Site) -> WeightFormat:
    return WeightFormat(*(site.attributes[name] for name in ("bits", "group_size", "asymmetric", "steps")))


def _sums(site: Site) -> dict[str, int]:
    """How an int8 activation is summed."""
    return {name: site.attributes[f"int8_{name}"] for name in ("group_size", "sum_factor")}


def _written_act(site: Site, graph: GraphParams) -> dict[str, int | str]:
    """The dtype of a packed activation that a kernel writes; of int8, also the groups it is summed in."""
    if "int8_group_size" in site.attributes:
        return {"act_dtype": "i8", **_sums(site)}
    return {"act_dtype": graph.act_dtype}


def _rms_norm(site: Site, graph: GraphParams) -> tuple[KernelSpec, Buffers]:
    spec = KernelSpec.of(
        "norm",
        "rms_norm",
        dim=site.attributes["widths"]["x"],
        eps=float(site.attributes["eps"]),
        **_written_act(site, graph),
        **_rows(site, graph),
    )
    return spec, ("x", "weight", "out")


def _matmul(site: Site, graph: GraphParams) -> tuple[dict[str, Any], Buffers]:
    """What every linear kernel needs to know, and the operands that this one has beside x, weight and out."""
    n, k = site.attributes["weight_shapes"]["weight"]
    optional = tuple(name for name in ("bias", "residual") if name in site.tensors)
    given = {name: name in optional for name in ("bias", "residual")}
    return {"k": k, "n": n, "gated": _gated(site, graph), **given, **_rows(site, graph)}, optional


def _gated(site: Site, graph: GraphParams) -> str:
    """What a linear kernel with a gate writes (see `sums.GATED`)."""
    return graph.act_dtype if site.op.startswith("gated_linear") else ""


def _is_quantized_later(site: Site) -> bool:
    """Whether a gated linear's rows become int8: only whole rows can, and its tasks have columns of them."""
    return site.op.startswith("gated_linear") and "int8_group_size" in site.attributes


def _gated_width(site: Site) -> int:
    return int(site.attributes["weight_shapes"]["weight"][0]) // 2


def _written_by_linear(site: Site) -> str:
    return BufferSource.SCRATCH if _is_quantized_later(site) else "out"


def _linear(site: Site, graph: GraphParams) -> tuple[KernelSpec, Buffers]:
    params, optional = _matmul(site, graph)
    spec = linear_spec(dtype=graph.act_dtype, **params)
    return spec, ("x", "weight", *optional, _written_by_linear(site))


def _linear_quant(site: Site, graph: GraphParams) -> tuple[KernelSpec, Buffers]:
    params, optional = _matmul(site, graph)
    act = "i8" if site.attributes["int8"] else graph.act_dtype
    format = _weight_format(site)
    spec = linear_quant_spec(act_dtype=act, format=format, **params)
    of_group = (f".{format.of_group}",) if format.of_group else ()
    return spec, ("x", "weight", BufferSource.SCALE, *of_group, *optional, _written_by_linear(site))


def _quantize_rows(site: Site, graph: GraphParams) -> tuple[KernelSpec, Buffers]:
    gated = _is_quantized_later(site)
    spec = KernelSpec.of(
        "other",
        "quantize_rows",
        dim=_gated_width(site) if gated else site.attributes["widths"]["x"],
        act_dtype=graph.act_dtype,
        **_sums(site),
        **_rows(site, graph),
    )
    return spec, (BufferSource.SCRATCH if gated else "x", "out")


def _rope_kv_write(site: Site, graph: GraphParams) -> tuple[KernelSpec, Buffers]:
    a = site.attributes
    qk_norm = "q_norm" in site.tensors
    spec = KernelSpec.of(
        "rope",
        "rope_kv_write",
        num_heads=a["num_heads"],
        num_kv_heads=a["num_kv_heads"],
        head_dim=a["head_dim"],
        rotary_dim=a["widths"]["cos_sin"],
        qk_norm=qk_norm,
        norm_eps=float(a.get("norm_eps", 0.0)),
        kv_dtype=graph.kv_dtype,
        block_size=graph.block_size,
    )
    norms = ("q_norm", "k_norm") if qk_norm else ()
    pools = (BufferSource.K_POOL, BufferSource.V_POOL)
    return spec, ("qkv", *norms, "cos_sin", "positions", "slot_mapping", *pools, "out")


def _paged_attention(site: Site, graph: GraphParams) -> tuple[KernelSpec, Buffers]:
    a = site.attributes
    spec = KernelSpec.of(
        "attention",
        "paged_attention",
        num_heads=a["num_heads"],
        num_kv_heads=a["num_kv_heads"],
        head_dim=a["head_dim"],
        scale=float(a["scale"]),
        window=a["window"],
        row_tile=graph.row_tile,
        act_dtype=graph.act_dtype,
        kv_dtype=graph.kv_dtype,
        block_size=graph.block_size,
        segments=graph.segments,
    )
    inputs = ("q", "block_tables", "token_seq", "positions", BufferSource.K_POOL, BufferSource.V_POOL)
    return spec, (*inputs, *((BufferSource.SCRATCH,) if graph.segments else ()), "out")


def _merge_attention(site: Site, graph: GraphParams) -> tuple[KernelSpec, Buffers]:
    a = site.attributes
    spec = KernelSpec.of(
        "attention",
        "merge_attention",
        num_heads=a["num_heads"],
        head_dim=a["head_dim"],
        window=a["window"],
        row_tile=graph.row_tile,
        act_dtype=graph.act_dtype,
        block_size=graph.block_size,
        segments=graph.segments,
    )
    return spec, ("positions", BufferSource.SCRATCH, "out")


def scratch_bytes(site: Site, graph: GraphParams) -> int:
    """Bytes of what a site's commands pass to each other beside its tensors."""
    a = site.attributes
    if site.op == "paged_attention":
        return 4 * graph.tokens * a["num_heads"] * graph.segments * partial_floats(a["head_dim"])
    words = -(-_gated_width(site) // DTYPES[graph.act_dtype].lanes) if _is_quantized_later(site) else 0
    return 4 * graph.tokens * words


def _gather_rows(site: Site, graph: GraphParams) -> tuple[KernelSpec, Buffers]:
    return KernelSpec.of("gather", "gather_rows", dim=site.attributes["widths"]["x"]), ("x", "index", "out")


def fused_spec(name: str, program: str, layouts: tuple[str, ...], graph: GraphParams) -> KernelSpec:
    """The kernel of a row program (`rowwise.py`, JSON).

    name: its ops, for people. layouts: of each tensor, "packed", "weight" or another operand kind.
    """
    value = json.loads(program)
    on_samples = value.pop("rows") == "samples"
    for tensor, layout in zip([*value["inputs"], *value["outputs"]], layouts, strict=True):
        tensor["packed"] = layout == "packed"
        if layout == "weight":
            tensor["dtype"] = "f32"  # as weights that no linear or embedding reads are stored
    return KernelSpec.of(
        "other",
        "fused",
        name=name,
        program=json.dumps(value, separators=(",", ":"), sort_keys=True),
        rows=NUM_SAMPLES if on_samples else NUM_TOKENS,
        row_tile=graph.sample_row_tile if on_samples else graph.row_tile,
    )


_TEMPLATES: dict[str, Callable[[Site, GraphParams], tuple[KernelSpec, Buffers]]] = {
    "embedding": _embedding,
    "embedding_quant": _embedding_quant,
    "rms_norm": _rms_norm,
    "linear": _linear,
    "linear_quant": _linear_quant,
    "gated_linear": _linear,
    "gated_linear_quant": _linear_quant,
    "quantize_rows": _quantize_rows,
    "rope_kv_write": _rope_kv_write,
    "paged_attention": _paged_attention,
    "gather_rows": _gather_rows,
}


def commands_of(site: Site, graph: GraphParams) -> list[tuple[KernelSpec, Buffers]]:
    """The kernels that compute `site` in `graph`, in order, and the sources of their buffers in operand order."""
    template = _TEMPLATES.get(site.op)
    if template is None:
        raise CompileError(f"op llmc::{site.op} has no kernel template; known: {', '.join(sorted(_TEMPLATES))}")
    commands = [template(site, graph)]
    if site.op == "paged_attention" and graph.segments:
        commands.append(_merge_attention(site, graph))
    if _is_quantized_later(site):
        commands.append(_quantize_rows(site, graph))
    return commands
