"""StableLM: layer norms with biases, a quarter of each head rotated."""

from __future__ import annotations

from dataclasses import replace

from llmc.models.config import ModelConfig
from llmc.models.families.family import Family
from llmc.models.fields import Fields
from llmc.models.layout import Layout
from llmc.models.rope_fields import read_rope
from llmc.models.standard import head_sizes, standard_config

_LAYOUT = Layout(q_norm="self_attn.q_layernorm.norms.{}", k_norm="self_attn.k_layernorm.norms.{}")


def read_config(fields: Fields, generation: Fields) -> ModelConfig:
    """qk_layernorm: every head of q and k has a norm of its own."""
    bias = fields.flag("use_qkv_bias", False)
    positions = fields.integer("max_position_embeddings")
    config = standard_config(
        fields,
        generation,
        attention_bias=bias,
        o_bias=False,
        qk_norm="each_head" if fields.flag("qk_layernorm", False) else "none",
        eps="layer_norm_eps",
        rope=read_rope(fields, positions, head_sizes(fields)[2], partial=0.25),
        norm="layer",
        norm_bias=True,
    )
    return replace(config, residual="parallel") if fields.flag("use_parallel_residual", False) else config


STABLELM = Family("stablelm", read_config, _LAYOUT.weight_map)
