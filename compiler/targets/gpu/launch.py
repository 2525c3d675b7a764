"""The number of groups with which to launch a kernel. Bits do not depend on it. Imports no tvm."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

from llmc.compiler.kernel_spec import KernelSpec, Param
from llmc.compiler.targets.gpu import tensor_attention as attentions
from llmc.compiler.targets.gpu import tensor_cores as tensors
from llmc.compiler.targets.gpu.attention_split import groups_of, side_by_side, tokens_together
from llmc.compiler.targets.gpu.linear_forms import launch_tiles
from llmc.compiler.targets.gpu.plain_forms import ITEMS as PLAIN_ITEMS
from llmc.compiler.targets.gpu.plain_forms import MOST_ROWS, most_tiles
from llmc.compiler.targets.gpu.sampling import STAGES, block_of, candidates_of
from llmc.compiler.targets.gpu.state_tiles import ITEMS as STATE_ITEMS
from llmc.compiler.targets.gpu.state_tiles import StateTile

ITEMS = 64
"""Work items per group, but of kernels in which a group works on a whole row."""
_MOST_ITEMS = 256  # which most GPUs allow
_OWN_ELEMENTS = 8  # of a row that an item has, before a group has more items
EXPERT_ORDER = "expert_order"
Params = dict[str, Param]
_MOST_RUNS = 4  # that a tile of tokens has groups for; they take turns beyond it
_FIXED, _TOKENS, _SAMPLES = 0, 1, 2
_NUM_SAMPLES = 2  # number of the scalar that counts samples
_ON_SAMPLES = frozenset({"gather_rows", "pool_rows", "spread_logits"})
# Groups of ops whose units are parts of sequences, of which a step has about as many as samples.
_OF_SEQUENCES: dict[str, Callable[[Params], int]] = {
    "short_conv": lambda p: -(-int(p["channels"]) // ITEMS),
    "delta_rule": lambda p: int(p["heads"]) * StateTile(int(p["key_dim"]), int(p["value_dim"])).tiles,
    "selective_state": lambda p: int(p["heads"]) * StateTile(int(p["state_size"]), int(p["head_dim"])).tiles,
}
_OF_STATES = frozenset({"delta_rule", "selective_state"})


@dataclass(frozen=True)
class Launch:
    """`groups` groups for each tile of `tile_rows` rows in the bucket.

    rows: of tokens, of samples, or _FIXED if the number of groups does not depend on rows (FORMAT.md).
    """

    rows: int
    groups: int
    tile_rows: int = 1
    stage: tuple[int, ...] = ()
    """For sampling: the stage's number, and sizes that the device must know."""
    items: int = ITEMS
    """Work items per group."""

    def facts(self) -> tuple[int, ...]:
        return self.items, self.rows, self.groups, self.tile_rows, *self.stage


def reads_whole_weights(spec: KernelSpec) -> bool:
    """Whether a kernel that commands call reads all of its weights, so that a device may copy them ahead of it. Others
    read some rows of a table, or the experts that tokens choose."""
    return spec.family == "linear" and "experts" not in spec.as_dict()


def _linear(rows: int, op: str, p: Params) -> Launch:
    """A linear layer without tensor cores."""
    if op in _HEAD_LINEARS:
        heads = int(p["heads"])
        return Launch(rows, heads * most_tiles(int(p["n"]) // heads, 1), MOST_ROWS, items=PLAIN_ITEMS)
    parts = 2 if p.get("gated") else 1
    tiles = most_tiles(int(p["n"]) // parts, parts)
    if "top_k" in p:  # a row has its own weights
        return Launch(rows, tiles * int(p["top_k"]), items=PLAIN_ITEMS)
    return Launch(rows, tiles, MOST_ROWS, items=PLAIN_ITEMS)


def _fused(rows: int, p: Params) -> Launch:
    """One group per row if there is a reduction, else one per block of output elements."""
    program: dict[str, Any] = json.loads(str(p["program"]))
    reduced = [prod(stage["extents"]) for stage in program["stages"] if stage["reduce"]]
    if reduced:
        return Launch(rows, 1, items=items_of_row(max(reduced)))
    widest: int = max(prod(out["shape"]) for out in program["outputs"])
    return Launch(rows, -(-widest // ITEMS))


def _dim(p: Params) -> int:
    return int(p["dim"])


def items_of_row(width: int) -> int:
    """Items of a group that works on a row: a power of two. Each has a chain of a sum over it."""
    items = ITEMS
    while items < _MOST_ITEMS and items * _OWN_ELEMENTS < width:
        items *= 2
    return items


def _attention(rows: int, p: Params, width: int) -> Launch:
    heads, kv_heads = int(p["num_heads"]), int(p["num_kv_heads"])
    groups, tokens = groups_of(heads, kv_heads, width, int(p["segments"])), 1
    if p.get("runs"):
        tokens = tokens_together(heads, kv_heads, width)
    return Launch(rows, groups * min(tokens, _MOST_RUNS), tokens)


def _tensor_attention(rows: int, p: Params, of: attentions.TensorAttention) -> Launch:
    groups = of.units * side_by_side(int(p["segments"]))
    return Launch(rows, groups * min(of.tokens, _MOST_RUNS), of.tokens, items=attentions.ITEMS)


# Units per row for single items, by op; 1 for all others.
_UNITS: dict[str, Callable[[Params], int]] = {
    **dict.fromkeys(("embedding", "embedding_quant", "gather_rows_leaving"), _dim),
    **dict.fromkeys(("activate", "beside_states", "expert_combine", "permute_columns", "pool_rows"), _dim),
    **dict.fromkeys(("placed_rows", "read_states", "rope_rows"), _dim),
    "gather_rows": lambda p: int(p["dim"]) * int(p.get("count", 1)),
    "spread_logits": lambda p: int(p["out"]),
    "held_experts": lambda p: int(p["top_k"]),
    EXPERT_ORDER: lambda p: int(p["top_k"]),
    "expert_gather": lambda p: int(p["top_k"]) * int(p["dim"]),
    "rank_sum": lambda p: int(p["width"]),
    "expert_activate": lambda p: int(p["top_k"]) * int(p["dim"]),
    "adapter_expand": lambda p: (
        sum(map(int, str(p["parts"]).split())) * int(p.get("top_k", 1)) * int(p.get("heads", 1))
    ),
    "adapter_pick": lambda p: int(p["width"]),
    "adapter_pairs": lambda p: int(p["tile_rows"]) * int(p["top_k"]),
}
# Units per row for whole groups, by op.
_GROUPS: dict[str, Callable[[Params], int]] = {
    "rope_kv_write": lambda p: int(p["num_heads"]) + 2 * int(p["num_kv_heads"]),
    "latent_kv_write": lambda p: int(p["num_heads"]) + 1,
    "choose_experts": lambda p: 1,
    "merge_attention": lambda p: int(p["num_heads"]),
    "adapter_shrink": lambda p: int(p["width"]) * int(p.get("top_k", 1)),
}
# Groups per row that work on a whole row of `dim` elements, by op.
_ROWS: dict[str, Callable[[Params], int]] = {
    "rms_norm": lambda p: 1,
    "quantize_rows": lambda p: 1,
    "expert_quantize": lambda p: int(p["top_k"]),
}
# Ops of attention, and the parameter that is the width of their values.
_ATTENTION = {"paged_attention": "head_dim", "rotated_attention": "head_dim", "latent_attention": "rank"}
_HEAD_LINEARS = frozenset({"head_linear", "packed_head_linear"})
_LINEARS = frozenset({"linear", "linear_quant", "expert_linear", "expert_linear_quant"}) | _HEAD_LINEARS


def launch_of(spec: KernelSpec, *, tensor_cores: bool = False) -> Launch:
    """The launch of a kernel. tensor_cores: whether the target has them. Raises KeyError on missing parameters."""
    p = spec.as_dict()
    on_samples = spec.op in _ON_SAMPLES or p.get("rows") == _NUM_SAMPLES
    rows = _SAMPLES if on_samples else _TOKENS
    if spec.op in STAGES:
        vocab = int(p["vocab"])
        return Launch(_FIXED, 1, stage=(STAGES.index(spec.op) + 1, block_of(vocab), candidates_of(vocab)))
    if tensor_cores and (layer := tensors.tensor_layer(spec)) is not None:
        groups, tile_rows = launch_tiles(layer)
        return Launch(rows, groups, tile_rows, items=tensors.ITEMS)
    if tensor_cores and (attention := attentions.tensor_attention(spec)) is not None:
        return _tensor_attention(rows, p, attention)
    if tensor_cores and tensors.shrinks_on_tensor_cores(spec):
        groups, tile_rows = tensors.shrink_tiles(spec)
        return Launch(rows, groups, tile_rows, items=tensors.ITEMS)
    if tensor_cores and spec.op == EXPERT_ORDER:
        return Launch(_FIXED, int(p["experts"]))
    if spec.op in _OF_SEQUENCES:
        return Launch(_SAMPLES, _OF_SEQUENCES[spec.op](p), items=STATE_ITEMS if spec.op in _OF_STATES else ITEMS)
    if spec.op in _LINEARS:
        return _linear(rows, spec.op, p)
    if spec.op in _ATTENTION:
        return _attention(rows, p, int(p[_ATTENTION[spec.op]]))
    if spec.op == "fused":
        return _fused(rows, p)
    if spec.op in _ROWS:
        return Launch(rows, _ROWS[spec.op](p), items=items_of_row(_dim(p)))
    if spec.op in _GROUPS:
        return Launch(rows, _GROUPS[spec.op](p))
    units = _UNITS[spec.op](p) if spec.op in _UNITS else 1
    return Launch(rows, 1, max(1, ITEMS // units)) if units < ITEMS else Launch(rows, -(-units // ITEMS))
