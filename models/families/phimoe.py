"""Phi-3.5-MoE: layer norms, sparse mixing of the two best experts."""

from __future__ import annotations

from llmc.models.config import ModelConfig
from llmc.models.errors import ModelError
from llmc.models.families.family import Family
from llmc.models.families.mixtures import read_experts, stacked
from llmc.models.fields import Fields
from llmc.models.layout import Layout
from llmc.models.rope_fields import rope_of, rope_table
from llmc.models.rotary import Rope
from llmc.models.standard import head_sizes, standard_config
from llmc.models.windows import everywhere, stated_window

_LAYOUT = Layout(
    router="block_sparse_moe.gate",
    expert_gate_up=("block_sparse_moe.experts.{}.w1.weight", "block_sparse_moe.experts.{}.w3.weight"),
    expert_down="block_sparse_moe.experts.{}.w2.weight",
)
_STACKED = stacked(Layout(router="mlp.router"))


def _rope(fields: Fields) -> Rope:
    """short_mscale and long_mscale are equal and give longrope's factor."""
    table = rope_table(fields)
    scales = {table.number(name) for name in ("short_mscale", "long_mscale") if table.has(name)}
    if len(scales) > 1:
        raise ModelError(f"{table.origin}: a short_mscale that is not long_mscale is not supported")
    for scale in scales:
        table = table.with_values(attention_factor=scale)
    return rope_of(fields, table, fields.integer("max_position_embeddings"), head_sizes(fields)[2], theta=1e6)


def read_config(fields: Fields, generation: Fields) -> ModelConfig:
    experts = read_experts(
        fields,
        intermediate_size="intermediate_size",
        scores="mixer",
        mixer_noise=fields.number("router_jitter_noise", 0.01, positive=False),
        normalised=False,
    )
    if experts.top_k != 2:
        raise ModelError(f"{fields.origin}: a phimoe model with num_experts_per_tok {experts.top_k} is not supported")
    bias = fields.flag("attention_bias", False)
    return standard_config(
        fields,
        generation,
        attention_bias=bias,
        o_bias=bias,
        layer_windows=everywhere(fields, stated_window(fields)),
        default_eps=1e-5,
        rope=_rope(fields),
        norm="layer",
        norm_bias=True,
        head_bias=fields.flag("lm_head_bias", False),
        experts=experts,
    )


PHIMOE = Family(
    "phimoe",
    read_config,
    _LAYOUT.weight_map,
    other_maps=(_STACKED.weight_map,),
    harmless=frozenset({"input_jitter_noise"}),  # of training
)
