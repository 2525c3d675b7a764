"""Llama 4 of dense layers, and the same with all that attention knows: families that only tests have."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from llmc.models.alibi import paper_slopes
from llmc.models.config import Alibi, ModelConfig, QueryGrowth
from llmc.models.families.family import Family
from llmc.models.fields import Fields
from llmc.models.layout import Layout
from llmc.models.read_config import load_config
from llmc.models.standard import layer_count, standard_config

from support.tiny_models import make_tiny_model

_LAYOUT = Layout(
    interleaved=True, gate_up=("feed_forward.gate_proj", "feed_forward.up_proj"), down="feed_forward.down_proj"
)
FIELDS: dict[str, Any] = {
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "intermediate_size_mlp": 100,
    "moe_layers": [],
    "no_rope_layers": [1, 0, 1],
    "attention_chunk_size": 7,
    "floor_scale": 4,
    "attn_scale": 0.3,
}


def read_config(fields: Fields, generation: Fields) -> ModelConfig:
    """Layers that rotate have chunks, and heads normed after it; queries of the others grow."""
    rotates = fields.integers("no_rope_layers", layer_count(fields))
    chunk = fields.integer("attention_chunk_size")
    return standard_config(
        fields.with_values(intermediate_size=fields.integer("intermediate_size_mlp")),
        generation,
        attention_bias=False,
        o_bias=False,
        qk_norm="unit",
        layer_chunks=tuple(chunk if rotated else 0 for rotated in rotates),
        unrotated_layers=tuple(i for i, rotated in enumerate(rotates) if not rotated),
        query_growth=QueryGrowth(fields.number("floor_scale"), fields.number("attn_scale")),
    )


def read_config_with_all(fields: Fields, generation: Fields) -> ModelConfig:
    config = read_config(fields, generation)
    return replace(config, sinks=True, attention_cap=2.0, alibi=Alibi(paper_slopes(config.num_heads)))


# Of experts, of which there are none, and what the numbers above say as well.
_HARMLESS = """
    attn_temperature_tuning interleave_moe_layer_step intermediate_size layer_types moe_layers no_rope_layer_interval
    num_experts_per_tok num_local_experts use_qk_norm
    """
DENSE_LLAMA4 = Family("llama4_text", read_config, _LAYOUT.weight_map, harmless=frozenset(_HARMLESS.split()))
WITH_ALL = Family("llama4_text", read_config_with_all, _LAYOUT.weight_map, harmless=frozenset(_HARMLESS.split()))


def checkpoint_with_all(path: Path, **fields: Any) -> Path:
    """A tiny model of `WITH_ALL`, which llmc must have."""
    model = make_tiny_model(path, "llama4_text", **{**FIELDS, **fields})
    tensors, config = load_file(model / "model.safetensors"), load_config(model)
    rng = np.random.default_rng(6)
    for layer in range(config.num_layers):
        tensors[f"model.layers.{layer}.self_attn.sinks"] = rng.normal(size=config.num_heads).astype(np.float32)
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    return model
