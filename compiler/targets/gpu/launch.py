"""How many groups a kernel is worth launching with. Bits do not depend on it. Imports no tvm."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

from llmc.compiler.kernel_spec import KernelSpec, Param
from llmc.compiler.targets.gpu import tensor_cores as tensors
from llmc.compiler.targets.gpu.sampling import STAGES, block_of, candidates_of

ITEMS = 64
"""Work items of a group."""
LINEAR_ROWS = 4
"""Rows of a tile of a linear layer."""
_FIXED, _TOKENS, _SAMPLES = 0, 1, 2
_NUM_SAMPLES = 2  # the scalar that counts them
_ON_SAMPLES = frozenset({"gather_rows", "pool_rows"})


@dataclass(frozen=True)
class Launch:
    """`groups` of them for each tile of `tile_rows` rows that the bucket holds. rows: of tokens or samples, or _FIXED,
    where the number of groups has nothing to do with rows (FORMAT.md)."""

    rows: int
    groups: int
    tile_rows: int = 1
    stage: tuple[int, ...] = ()
    """Of sampling: its number, and sizes that the device must know."""
    items: int = ITEMS
    """Of a group."""

    def facts(self) -> tuple[int, ...]:
        return self.items, self.rows, self.groups, self.tile_rows, *self.stage


Params = dict[str, Param]


def _tiles(p: Params) -> int:
    """Of columns of the result of a linear layer."""
    columns = int(p["n"]) // (2 if p.get("gated") else 1)
    return -(-columns // ITEMS)


def _fused_groups(p: Params) -> int:
    """A group a row where there is a reduction, else as many as outputs have blocks of elements."""
    program: dict[str, Any] = json.loads(str(p["program"]))
    if any(stage["reduce"] for stage in program["stages"]):
        return 1
    widest: int = max(prod(out["shape"]) for out in program["outputs"])
    return -(-widest // ITEMS)


# Units that single items work on, of a row, by op; 1 for all others.
_UNITS: dict[str, Callable[[Params], int]] = {
    "rope_kv_write": lambda p: int(p["num_heads"]) + 2 * int(p["num_kv_heads"]),
    "latent_kv_write": lambda p: int(p["num_heads"]) + 1,
    "latent_attention": lambda p: int(p["num_heads"]),
    "expert_order": lambda p: int(p["top_k"]),
    "expert_gather": lambda p: int(p["top_k"]),
    "silu_gate": lambda p: int(p["dim"]),
    "adapter_expand": lambda p: sum(map(int, str(p["parts"]).split())),
}
# Those that whole groups work on.
_GROUPS: dict[str, Callable[[Params], int]] = {
    "rms_norm": lambda p: 1,
    "quantize_rows": lambda p: 1,
    "expert_quantize": lambda p: int(p["top_k"]),
    "paged_attention": lambda p: int(p["num_heads"]),
    "fused": _fused_groups,
    "adapter_shrink": lambda p: int(p["width"]),
    "expert_linear": lambda p: _tiles(p) * int(p["top_k"]),
    "expert_linear_quant": lambda p: _tiles(p) * int(p["top_k"]),
}
_LINEARS = frozenset({"linear", "linear_quant"})
# Ops whose items share columns, and walk all rows.
_BY_COLUMNS = frozenset({"head_linear", "packed_head_linear"})


def launch_of(spec: KernelSpec, *, tensor_cores: bool = False) -> Launch:
    """Of a kernel. tensor_cores: whether the target has them. Raises KeyError for parameters that are missing."""
    p = spec.as_dict()
    on_samples = spec.op in _ON_SAMPLES or p.get("rows") == _NUM_SAMPLES
    rows = _SAMPLES if on_samples else _TOKENS
    if spec.op in STAGES:
        vocab = int(p["vocab"])
        return Launch(_FIXED, 1, stage=(STAGES.index(spec.op) + 1, block_of(vocab), candidates_of(vocab)))
    if tensor_cores and tensors.tensor_layer(spec) is not None:
        groups = tensors.launch_groups(int(p["n"]))
        return Launch(rows, groups, tensors.X_ROWS, items=tensors.ITEMS)
    if spec.op in _LINEARS:
        return Launch(rows, _tiles(p), LINEAR_ROWS)
    if spec.op in _BY_COLUMNS:
        return Launch(_FIXED, -(-int(p["n"]) // ITEMS))
    if spec.op in _GROUPS:
        return Launch(rows, _GROUPS[spec.op](p))
    units = _UNITS[spec.op](p) if spec.op in _UNITS else 1
    return Launch(rows, 1, max(1, ITEMS // units)) if units < ITEMS else Launch(rows, -(-units // ITEMS))
