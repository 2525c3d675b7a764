"""Phi-1, 1.5 and 2: attention and MLP read one layer norm, biases everywhere."""

from __future__ import annotations

from llmc.models.config import ModelConfig
from llmc.models.errors import ModelError
from llmc.models.families.family import Family
from llmc.models.fields import Fields
from llmc.models.layout import Layout
from llmc.models.rope_fields import read_rope
from llmc.models.standard import head_sizes, standard_config

_LAYOUT = Layout(out="self_attn.dense", up="mlp.fc1", down="mlp.fc2", norm="model.final_layernorm")


def read_config(fields: Fields, generation: Fields) -> ModelConfig:
    if fields.flag("qk_layernorm", False):
        raise ModelError(f"{fields.origin}: qk_layernorm of a phi model is not supported")
    positions = fields.integer("max_position_embeddings")
    return standard_config(
        fields,
        generation,
        attention_bias=True,
        o_bias=True,
        mlp_bias=True,
        eps="layer_norm_eps",
        rope=read_rope(fields, positions, head_sizes(fields)[2], partial=0.5),
        norm="layer",
        norm_bias=True,
        gated=False,
        residual="parallel",
        head_bias=True,
    )


PHI = Family("phi", read_config, _LAYOUT.weight_map)
