"""LFM2 and LFM2.5: most layers have a gated short convolution, the others attention; dense, or a mixture of experts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from llmc.models.config import Experts, ModelConfig
from llmc.models.errors import ModelError
from llmc.models.families.delta_net import MOST_TAPS
from llmc.models.families.family import Family
from llmc.models.families.layer_kinds import CONV, FULL, read_layer_types
from llmc.models.families.mixtures import read_experts, stacked
from llmc.models.fields import Fields
from llmc.models.layout import Layout
from llmc.models.rope_fields import read_rope
from llmc.models.short_conv import ShortConv
from llmc.models.standard import head_sizes, layer_count, standard_config

LAYOUT = Layout(
    attention_norm="operator_norm",
    q_norm="self_attn.q_layernorm",
    k_norm="self_attn.k_layernorm",
    out="self_attn.out_proj",
    mlp_norm="ffn_norm",
    gate_up=("feed_forward.w1", "feed_forward.w3"),
    down="feed_forward.w2",
    router="feed_forward.gate",
    choice_bias="feed_forward.expert_bias",
    expert_gate_up=("feed_forward.experts.{}.w1.weight", "feed_forward.experts.{}.w3.weight"),
    expert_down="feed_forward.experts.{}.w2.weight",
    norm="model.embedding_norm",
)
_ALIASES = {"intermediate_size": "block_ff_dim", "tie_word_embeddings": "tie_embedding"}
"""Other names of fields."""
_REPEATED = {
    "num_attention_heads": ("num_heads",),
    "hidden_size": ("block_dim", "conv_dim", "conv_dim_out"),
    "norm_eps": ("block_norm_eps",),
    "rope_theta": ("theta",),
}
"""What published files state twice. The other names say nothing by themselves, and must state the same."""
_ADDED_SUM = 1e-6


def _renamed(fields: Fields) -> Fields:
    for ours, theirs in _REPEATED.items():
        for their in theirs:
            fields = fields.renamed(**{ours: their}) if fields.has(ours) else fields
    return fields.renamed(**_ALIASES)


def _layers(fields: Fields) -> tuple[int, ...]:
    """Those with a convolution. Where a config says nothing, all have attention."""
    count = layer_count(fields)
    usual = [FULL] * count
    if fields.has("full_attn_idxs"):
        attention = fields.integers("full_attn_idxs")
        usual = [FULL if i in attention else CONV for i in range(count)]
        if fields.has("layer_types") and list(fields.texts("layer_types", count)) != usual:
            raise ModelError(f"{fields.origin}: layer_types is not what full_attn_idxs says; take out the wrong one")
    return tuple(i for i, kind in enumerate(read_layer_types(fields, usual, CONV)) if kind == CONV)


def _short_conv(fields: Fields) -> ShortConv | None:
    layers = _layers(fields)
    taps, bias = fields.integer("conv_L_cache", 3), fields.flag("conv_bias", False)
    if not layers:
        return None
    if not 2 <= taps <= MOST_TAPS:
        raise ModelError(f"{fields.origin}: conv_L_cache {taps} is not from 2 to {MOST_TAPS}")
    return ShortConv(layers, fields.integer("hidden_size"), taps, bias)


def _inner_size(fields: Fields) -> int:
    """The width of a feed-forward block, of which files state 3/2 unless they say otherwise."""
    size, multiple = fields.integer("intermediate_size"), fields.integer("block_multiple_of", 256)
    factor = fields.number("block_ffn_dim_multiplier", 1.0)
    if not fields.flag("block_auto_adjust_ff_dim", True):
        return size
    adjusted = int(2 * size / 3)
    if fields.mentions("block_ffn_dim_multiplier") and not fields.has("block_ffn_dim_multiplier"):
        return adjusted  # transformers rounds up to the multiple only where a factor is stated
    return -(-int(factor * adjusted) // multiple) * multiple


def _config(fields: Fields, generation: Fields, **choices: Any) -> ModelConfig:
    """choices: of `standard_config`. The defaults are transformers'."""
    if not fields.has("num_key_value_heads"):
        fields = fields.with_values(num_key_value_heads=8)
    positions = fields.integer("max_position_embeddings")
    return standard_config(
        fields,
        generation,
        attention_bias=False,
        o_bias=False,
        qk_norm="head",
        eps="norm_eps",
        default_eps=1e-5,
        activation="silu",
        tie_word_embeddings=True,
        rope=read_rope(fields, positions, head_sizes(fields)[2], theta=1e6),
        short_conv=_short_conv(fields),
        **choices,
    )


def read_dense(fields: Fields, generation: Fields) -> ModelConfig:
    fields = _renamed(fields)
    return replace(_config(fields, generation), intermediate_size=_inner_size(fields))


def _experts(fields: Fields) -> Experts | None:
    """None if every layer has a plain block."""
    plain = fields.integer("num_dense_layers", 2, minimum=0)
    experts = read_experts(
        fields,
        intermediate_size="moe_intermediate_size",
        layers=tuple(range(plain, layer_count(fields))),
        scores="sigmoid",
        choice_bias=fields.flag("use_expert_bias", True),
        normalised=fields.flag("norm_topk_prob", True),
        added_sum=_ADDED_SUM,
        scale=fields.number("routed_scaling_factor", 1.0),
    )
    return experts if experts.layers else None


def read_mixture(fields: Fields, generation: Fields) -> ModelConfig:
    """The first layers have plain blocks, of the width that the file states."""
    fields = _renamed(fields)
    return _config(fields, generation, experts=_experts(fields))


# Values before training.
_OF_TRAINING = frozenset({
    "block_mlp_init_scale", "block_out_init_scale", "block_use_xavier_init", "conv_use_xavier_init",
})  # fmt: skip
_NEUTRAL = {"block_use_swiglu": True, "hidden_act": "silu", "use_pos_enc": True}
LFM2 = Family("lfm2", read_dense, LAYOUT.weight_map, harmless=_OF_TRAINING, neutral=_NEUTRAL)
LFM2_MOE = Family(
    "lfm2_moe",
    read_mixture,
    LAYOUT.weight_map,
    other_maps=(stacked(LAYOUT, "feed_forward.experts").weight_map,),
    harmless=_OF_TRAINING,
    # Only the dense family's width is adjusted.
    neutral={**_NEUTRAL, "block_auto_adjust_ff_dim": False},
)
