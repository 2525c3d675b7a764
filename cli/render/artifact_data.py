"""Contents of an artifact as plain data for tools: model, kernels, buckets, weights."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from typing import Any

from llmc.cli.render.ranks import ranks_data
from llmc.cli.render.stored_weights import (
    bits_per_weight,
    stored_weights,
    weights_by_class,
    weights_by_scheme,
)
from llmc.graphs_format import DTYPES, FAMILIES, STATES_USES
from llmc.graphs_records import Tables
from llmc.runtime.binding.artifact import pool_sizes
from llmc.runtime.context_limit import least_kv_bytes
from llmc.runtime.graph_view import op_of

_NO_LIMIT = 2**31 - 1


def _kernels(tables: Tables) -> list[dict[str, Any]]:
    calls: Counter[int] = Counter()
    for graph in tables.graphs:
        calls.update(c.kernel for c in tables.commands_of(graph))
    return [
        {
            "symbol": k.symbol,
            "op": op_of(k.symbol),
            "family": FAMILIES[k.family],
            "num_buffers": k.num_buffers,
            "calls": calls[i],
        }
        for i, k in enumerate(tables.kernels)
    ]


def _kv_pool(tables: Tables) -> dict[str, int]:
    """Bytes of a KV block, of a sequence's states, and of a pool for one sequence of the longest length; longest
    sequence, and slots of states, in the engine's default pool."""
    model = tables.model
    facts = {
        **{name: getattr(model, name) for name in ("block_size", "max_model_len", "max_num_seqs")},
        **{"kv_block_bytes": tables.kv_block_bytes, "state_bytes": tables.state_bytes},
        **{"max_kv_blocks": _NO_LIMIT, "max_states": _NO_LIMIT},
    }
    default = pool_sizes(facts)
    return {
        "block_bytes": tables.kv_block_bytes,
        "state_bytes": tables.state_bytes,
        "full_context_bytes": least_kv_bytes(facts),
        "default_max_request_tokens": min(model.max_model_len, default.num_blocks * model.block_size),
        "default_states": default.num_states,
    }


def _adapters(tables: Tables) -> dict[str, int] | None:
    """Limits of LoRA adapters, and number of adapter commands in a graph; None if no adapter can be loaded."""
    model = tables.model
    if not model.adapter_slots:
        return None
    mine = {i for i, kernel in enumerate(tables.kernels) if op_of(kernel.symbol).startswith("adapter_")}
    return {
        "slots": model.adapter_slots,
        "rank": model.adapter_rank,
        "layers": len(tables.adapters),
        "slot_bytes": sum(adapter.slot.bytes for adapter in tables.adapters),
        "commands": sum(command.kernel in mine for command in tables.commands_of(tables.graphs[0])),
    }


def artifact_data(tables: Tables, manifest: dict[str, Any]) -> dict[str, Any]:
    """Plain data of the artifact: model, kernels, buckets, weights by scheme and one by one."""
    weights = stored_weights(tables, manifest)
    return {
        "format_version": tables.header.version,
        "target": asdict(tables.target),
        "fingerprint": manifest.get("fingerprint"),
        "source": manifest.get("source"),
        "merged_lora": manifest.get("merged_lora") or [],
        "adapters": _adapters(tables),
        "ranks": ranks_data(tables),
        "model": {
            **asdict(tables.model),
            "kv_dtype": tables.model.kv.name,
            "act_dtype": DTYPES[tables.model.act_dtype],
            "states_use": STATES_USES[tables.model.takes_states] if tables.model.states_width else None,
            "draft_vocab_size": (manifest.get("model") or {}).get("draft_vocab_size", 0),
        },
        "images": manifest.get("images"),
        "context": manifest.get("context"),
        "kv_pool": _kv_pool(tables),
        "buckets": [
            {
                "bucket": g.name,
                "max_tokens": g.max_tokens,
                "max_seqs": g.max_seqs,
                "row_unit": g.row_unit,
                "commands": g.num_commands,
                "arena_bytes": g.arena_bytes,
            }
            for g in tables.graphs
        ],
        "kernels": _kernels(tables),
        "weights_by_scheme": weights_by_scheme(weights),
        "weights_by_class": weights_by_class(weights, manifest),
        "bits_per_weight": bits_per_weight(weights, manifest),
        "weights": weights,
    }
