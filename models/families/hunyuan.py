"""Hunyuan dense: heads are normed after rotation."""

from __future__ import annotations

from llmc.models.config import ModelConfig, Rope
from llmc.models.families.family import Family
from llmc.models.fields import Fields
from llmc.models.layout import Layout
from llmc.models.rope_fields import read_rope, rope_of, rope_table
from llmc.models.standard import head_sizes, standard_config

_LAYOUT = Layout(q_norm="self_attn.query_layernorm", k_norm="self_attn.key_layernorm")


def _rope(fields: Fields) -> Rope:
    """For type dynamic, alpha stretches the base, at every length."""
    table, positions = rope_table(fields), fields.integer("max_position_embeddings")
    dim = head_sizes(fields)[2]
    kind = table.text("rope_type" if table.has("rope_type") else "type", "default")
    if kind != "dynamic" or not table.has("alpha"):
        return read_rope(fields, positions, dim)
    theta = (table if table.has("rope_theta") else fields).number("rope_theta", 10000.0)
    stretched = theta * table.number("alpha") ** (dim / (dim - 2))
    return rope_of(fields, table.with_values(rope_type="default", rope_theta=stretched), positions, dim)


def read_config(fields: Fields, generation: Fields) -> ModelConfig:
    bias = fields.flag("attention_bias", False)
    return standard_config(
        fields,
        generation,
        attention_bias=bias,
        o_bias=bias,
        qk_norm="head",
        qk_norm_rotated=True,
        default_eps=1e-5,
        rope=_rope(fields),
    )


HUNYUAN_V1_DENSE = Family("hunyuan_v1_dense", read_config, _LAYOUT.weight_map, harmless=frozenset({"eod_token_id"}))
