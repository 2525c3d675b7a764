"""experts: the weighted sum of the outputs of each token's chosen experts.

- `expert_order` assigns each expert in use a run of rows that starts at a multiple of ROW_UNIT.
- `expert_gather` copies activations there, in the layout of linear layers.
- `expert_quantize` rounds the rows to int8 before a layer with integer sums.
- `expert_linear` is a linear layer of each expert in use over its rows, of gate and up first, then of down.
- `expert_combine` adds the results of a token in the order in which its experts were chosen, so that nothing of it
  depends on other tokens.

With a pool of adapters (`adapters.py`), `adapter_pairs` makes tiles of those rows that share an adapter and an expert.
The sums of gate and up are then plain floats, to which adapters add, and `expert_activate` makes the input of down.
"""

from __future__ import annotations

from dataclasses import dataclass

from llmc.compiler.dtypes import FLOATS
from llmc.compiler.graph.commands import Site
from llmc.compiler.kernel_spec import KernelSpec, Param
from llmc.compiler.ops.adapters import ADAPTERS, SHRUNK, adapter_spec, pool_of, shrunk_width, slot_of
from llmc.compiler.ops.definition import (
    ANY_FLOAT,
    F32,
    I32,
    NUM_TOKENS,
    Argument,
    BufferSource,
    Call,
    GraphParams,
    KernelCall,
    OpDef,
)
from llmc.compiler.weight_request import COLUMNS
from llmc.graphs_format import TILE_RECORD, TILE_ROWS
from llmc.quantize import WeightFormat
from llmc.quantize.formats.base import Sums
from llmc.quantize.formats.registry import format_of

EXPERT_LINEAR, EXPERT_LINEAR_QUANT = "expert_linear", "expert_linear_quant"
QUANTIZED = "quantized_experts"
"""Attribute of a site: {weight: {"format": its record, "int8": whether rows are int8}} of quantized weights.

"ordered": whether rows are in the order of each expert's columns.
"""
WEIGHTS = ("gate_up", "down")
ROW_UNIT = 16
"""An expert's rows begin at a multiple of this, so that all its data start at a cache line."""
_INDEX, _ROWS, _INNER, _INT8 = (BufferSource.of_scratch(name) for name in ("index", "rows", "inner", "int8"))
_SUMS, _PAIRS, _SHRUNK = (BufferSource.of_scratch(name) for name in ("sums", "pairs", SHRUNK))


def index_ints(experts: int, pairs: int) -> int:
    """Most integers that `expert_order` writes on any target, for `pairs` (token, expert) pairs."""
    return max(8 * (experts + 1) + pairs, experts + 2 + 2 * pairs)


def held_rows(experts: int, pairs: int) -> int:
    """Most rows of all experts in use, including the gaps between them."""
    return pairs + min(experts, pairs) * (ROW_UNIT - 1)


@dataclass(frozen=True)
class _Stored:
    """The storage of one linear layer's weight.

    format: None for floats of the activation dtype. int8: whether its input rows are int8. ordered: whether they are in
    each expert's column order.
    """

    format: WeightFormat | None = None
    int8: bool = False
    ordered: bool = False

    @classmethod
    def of(cls, site: Site, weight: str) -> _Stored:
        """Reads attribute `quantized_experts` of the site."""
        found = site.attributes.get(QUANTIZED, {}).get(weight)
        return cls() if found is None else cls(format_of(found["format"]), bool(found["int8"]), "ordered" in found)

    def sums(self) -> Sums | None:
        return self.format.sums if self.format is not None and self.int8 else None

    def spec(self, act_dtype: str, **params: Param) -> KernelSpec:
        """As `linear_spec` or `linear_quant_spec`, for weights [experts · n, k] and rows assigned by `expert_order`."""
        if self.format is None:
            return KernelSpec.of("linear", EXPERT_LINEAR, act_dtype=act_dtype, weight_dtype=act_dtype, **params)
        act, of_format = "i8" if self.int8 else act_dtype, self.format.kernel_params()
        return KernelSpec.of("linear", EXPERT_LINEAR_QUANT, act_dtype=act, **of_format, **params)

    def planes(self, weight: str, width: int) -> tuple[str, ...]:
        """The operands besides the numbers of a weight."""
        planes = () if self.format is None else self.format.planes(width)
        return tuple(f"{weight}.{plane.name}" for plane in planes)


class _Sizes:
    """Widths at a site: of tokens, of an expert's inner activation, and of its result."""

    def __init__(self, site: Site) -> None:
        shapes = site.attributes["weight_shapes"]
        self.experts, self.top_k = int(site.attributes["num_experts"]), int(site.attributes["widths"]["chosen"]) // 2
        rows, self.width = shapes["gate_up"]
        self.gated = bool(site.attributes.get("gated", True))
        self.first = int(rows) // self.experts
        """Rows of an expert's gate and up, or of up alone."""
        self.inner = self.first // (2 if self.gated else 1)
        self.out = int(shapes["down"][0]) // self.experts
        self.stored = {weight: _Stored.of(site, weight) for weight in WEIGHTS}
        self.widths = {"gate_up": int(self.width), "down": self.inner}
        self.adapted = ADAPTERS in site.attributes


def _kernels(site: Site, graph: GraphParams) -> list[KernelCall]:
    sizes, act, layout = _Sizes(site), graph.act_dtype, graph.row_params()
    biases = {name: name in site.tensors for name in ("gate_up_bias", "down_bias")}
    residual = "residual" in site.tensors
    limit, gain = (float(site.attributes.get(name, 0.0)) for name in ("gate_limit", "gate_gain"))
    # Left out where all experts are here, so that kernels have the names that they had.
    some: dict[str, Param] = {"some": True} if site.attributes.get("some") else {}
    of_pairs: dict[str, Param] = {"experts": sizes.experts, "top_k": sizes.top_k, "rows": NUM_TOKENS, **some}
    activation = str(site.attributes.get("activation", "silu"))
    of_gate: dict[str, Param] = {"gate_limit": limit, "gate_gain": gain} if limit else {}
    of_gate |= {} if activation == "silu" else {"activation": activation}

    def linear(x: str, weight: str, out: str, n: int, gated: str = "", **of_gate: Param) -> list[KernelCall]:
        bias, stored, width = f"{weight}_bias", sizes.stored[weight], sizes.widths[weight]
        calls, of_experts = [], {"experts": sizes.experts, "top_k": sizes.top_k, **layout}
        if (sums := stored.sums()) is not None:
            of_sums = {"group_size": sums.group_size, "sum_factor": sums.factor}
            spec = KernelSpec.of("other", "expert_quantize", dim=width, act_dtype=act, **of_sums, **of_experts)
            calls.append(KernelCall(spec, (x, _INDEX, _INT8)))
            x = _INT8
        spec = stored.spec(act, k=width, n=n, gated=gated, bias=biases[bias], **of_gate, **of_experts)
        optional = (bias,) if biases[bias] else ()
        inputs = (x, weight, *stored.planes(weight, width), *optional, _INDEX)
        return [*calls, KernelCall(spec, (*inputs, out))]

    order = KernelSpec.of("other", "expert_order", row_unit=ROW_UNIT, **of_pairs, **layout)
    ordered = sizes.stored["gate_up"].ordered
    in_order: dict[str, Param] = {"ordered": True} if ordered else {}
    gather = KernelSpec.of("gather", "expert_gather", dim=sizes.width, act_dtype=act, **in_order, **of_pairs, **layout)
    columns = (f"gate_up.{COLUMNS}",) if ordered else ()
    combine = KernelSpec.of("other", "expert_combine", dim=sizes.out, residual=residual, **of_pairs)
    first = [
        KernelCall(order, ("chosen", _INDEX)),
        KernelCall(gather, ("x", *columns, "chosen", _INDEX, _ROWS)),
    ]
    last = KernelCall(combine, (_ROWS, "chosen", _INDEX, *(("residual",) if residual else ()), "out"))
    if not sizes.adapted:
        of_gate |= {} if sizes.gated else {"activated": act}
        gate_up = linear(_ROWS, "gate_up", _INNER, sizes.first, act if sizes.gated else "", **of_gate)
        return [*first, *gate_up, *linear(_INNER, "down", _ROWS, sizes.out), last]
    pairs = KernelSpec.of("other", "adapter_pairs", tile_rows=TILE_ROWS, **of_pairs)
    of_inner: dict[str, Param] = {"dim": sizes.inner, "act_dtype": act, "activation": activation, "gated": sizes.gated}
    activate = KernelSpec.of("activation", "expert_activate", **{**of_inner, **of_gate}, **of_pairs, **layout)
    return [
        first[0],
        KernelCall(pairs, (BufferSource.ADAPTER_TILES, "chosen", _INDEX, _PAIRS), barrier=False),
        first[1],
        *_adapted(site, graph, "gate_up", _ROWS, _SUMS, linear(_ROWS, "gate_up", _SUMS, sizes.first)),
        KernelCall(activate, (_SUMS, "chosen", _INDEX, _INNER)),
        *_adapted(site, graph, "down", _INNER, _ROWS, linear(_INNER, "down", _ROWS, sizes.out)),
        last,
    ]


def _adapted(
    site: Site, graph: GraphParams, weight: str, x: str, out: str, calls: list[KernelCall]
) -> list[KernelCall]:
    """The kernels of a linear layer of experts, with those of its adapters."""
    sizes, slot, rows = _Sizes(site), slot_of(site, graph, weight), tuple(pool_of(site, weight)["rows"])
    of_experts = {"experts": sizes.experts, "top_k": sizes.top_k, "act_dtype": graph.act_dtype}
    shrink = adapter_spec("adapter_shrink", slot, sizes.widths[weight], rows, **of_experts, **graph.row_params())
    expand = adapter_spec("adapter_expand", slot, sizes.widths[weight], rows, **of_experts)
    pool = BufferSource.of_pool(weight)
    return [
        KernelCall(shrink, (x, _INDEX, _PAIRS, pool, _SHRUNK), barrier=False),
        *calls,
        KernelCall(expand, (_SHRUNK, _PAIRS, pool, out)),
    ]


def _adapter_scratch(site: Site, graph: GraphParams, sizes: _Sizes, rows: int, pairs: int) -> dict[str, int]:
    """rows: most rows of all experts."""
    widest = max(shrunk_width(slot_of(site, graph, weight)) for weight in WEIGHTS)
    # A pair of every row of a tile of tokens may have a tile of its own, used or not.
    tiles = 1 + TILE_RECORD * TILE_ROWS * pairs
    return {"sums": 4 * rows * sizes.first, "pairs": 4 * tiles, SHRUNK: 4 * rows * widest}


def _scratch(site: Site, graph: GraphParams) -> dict[str, int]:
    """Results may overwrite the experts' rows: those have been read by then."""
    sizes, pairs = _Sizes(site), graph.shape.tokens * int(site.attributes["widths"]["chosen"]) // 2
    rows, per_word = held_rows(sizes.experts, pairs), FLOATS[graph.act_dtype].per_word
    words = {weight: -(-width // per_word) for weight, width in sizes.widths.items()}
    sums = {weight: sizes.stored[weight].sums() for weight in WEIGHTS}
    int8 = [
        graph.target.int8_row_words(width, found.groups(width))
        for weight, width in sizes.widths.items()
        if (found := sums[weight]) is not None
    ]
    return {
        "index": 4 * index_ints(sizes.experts, pairs),
        "rows": 4 * rows * max(words["gate_up"], sizes.out),
        "inner": 4 * rows * words["down"],
        **({"int8": 4 * rows * max(int8)} if int8 else {}),
        **(_adapter_scratch(site, graph, sizes, rows, pairs) if sizes.adapted else {}),
    }


def _result(call: Call) -> tuple[tuple[object, int], str]:
    return (call.shapes["x"][0], int(call.shapes["down"][0]) // int(call.values["num_experts"])), F32[0]


_MATRIX, _BIAS = Argument(2, ANY_FLOAT), Argument(1, F32)
EXPERTS = OpDef(
    "experts",
    {
        "x": Argument(2, ANY_FLOAT, packed=True),
        "chosen": Argument(2, I32),
        "gate_up": _MATRIX,
        "down": _MATRIX,
        "gate_up_bias": _BIAS,
        "down_bias": _BIAS,
        "residual": Argument(2, F32),
    },
    _result,
    _kernels,
    scratch_parts=_scratch,
    calls=("expert_order", "expert_gather", EXPERT_LINEAR, "expert_combine"),
    quantized_calls=("expert_order", "expert_gather", EXPERT_LINEAR_QUANT, "expert_combine"),
)
