"""Hunyuan: heads are normed after rotation. hunyuan_v1_moe: with experts, and one that all tokens share."""

from __future__ import annotations

from dataclasses import replace

from llmc.models.brief import brief
from llmc.models.config import ModelConfig, Rope
from llmc.models.errors import ModelError
from llmc.models.families.family import Family
from llmc.models.families.mixtures import read_experts, stacked
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


def _same_in_all(fields: Fields, name: str, usual: int) -> int:
    """An integer that a config may state for each layer."""
    found = fields.raw(name, usual)
    if isinstance(found, list) and found and all(one == found[0] for one in found):
        fields = fields.with_values(**{name: found[0]})
    elif isinstance(found, list):
        raise ModelError(f"{fields.origin}: {name} {brief(found)} differs between layers, which is not supported")
    return fields.integer(name, usual)


def read_mixture(fields: Fields, generation: Fields) -> ModelConfig:
    inner = fields.integer("intermediate_size")
    inner = _same_in_all(fields, "moe_intermediate_size", inner)
    values = {
        "num_experts": _same_in_all(fields, "num_experts", 1),
        "num_experts_per_tok": _same_in_all(fields, "moe_topk", 1),
        "intermediate_size": inner,
    }
    shared = _same_in_all(fields, "num_shared_expert", 1) * inner
    experts = read_experts(
        fields.with_values(**values),
        intermediate_size="intermediate_size",
        scores="softmax",
        normalised=True,
        shared_size=shared,
    )
    return replace(read_config(fields, generation), experts=experts)


_MIXTURE = replace(_LAYOUT, router="mlp.gate.wg", shared="mlp.shared_mlp")
HUNYUAN_V1_MOE = Family(
    "hunyuan_v1_moe",
    read_mixture,
    _MIXTURE.weight_map,
    other_maps=(stacked(_MIXTURE).weight_map,),
    harmless=frozenset({"eod_token_id", "moe_drop_tokens", "moe_random_routing_dropped_token"}),
    neutral={"moe_layer_num_skipped": 0, "norm_type": "rms", "use_cla": False, "use_qk_norm": True},
)
HUNYUAN_V1_DENSE = Family("hunyuan_v1_dense", read_config, _LAYOUT.weight_map, harmless=frozenset({"eod_token_id"}))
