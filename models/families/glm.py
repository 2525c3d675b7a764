"""GLM-4 9B (glm) and GLM-4 0414 (glm4, with norms after the blocks too): half of each head rotated, in neighbours."""

from __future__ import annotations

from dataclasses import replace

from llmc.models.config import ModelConfig
from llmc.models.families.family import Family
from llmc.models.fields import Fields
from llmc.models.layout import Layout
from llmc.models.rope_fields import read_rope
from llmc.models.standard import head_sizes, standard_config

_LAYOUT = Layout(interleaved=True, gate_up=("mlp.gate_up_proj",))
_GLM4_LAYOUT = replace(_LAYOUT, post_attention_norm="post_self_attn_layernorm", post_mlp_norm="post_mlp_layernorm")


def read_config(fields: Fields, generation: Fields) -> ModelConfig:
    positions = fields.integer("max_position_embeddings")
    return standard_config(
        fields,
        generation,
        attention_bias=fields.flag("attention_bias", True),
        o_bias=False,
        head_dim=128,
        rope=read_rope(fields, positions, head_sizes(fields, 128)[2], partial=0.5),
    )


def read_config_4(fields: Fields, generation: Fields) -> ModelConfig:
    return replace(read_config(fields, generation), residual="sandwich")


GLM = Family("glm", read_config, _LAYOUT.weight_map)
GLM4 = Family("glm4", read_config_4, _GLM4_LAYOUT.weight_map)
