"""MiniMax-M2: q and k normed as a whole, half of each head rotated, experts with sigmoid scores."""

from __future__ import annotations

from llmc.models.config import ModelConfig
from llmc.models.families.family import Family
from llmc.models.families.layer_kinds import check_layers
from llmc.models.families.mixtures import read_experts, stacked
from llmc.models.fields import Fields
from llmc.models.layout import Layout
from llmc.models.rope_fields import read_rope, rope_table
from llmc.models.rotary import Rope
from llmc.models.standard import head_sizes, layer_count, standard_config

_LAYOUT = Layout(
    router="block_sparse_moe.gate",
    choice_bias="block_sparse_moe.e_score_correction_bias",
    expert_gate_up=("block_sparse_moe.experts.{}.w1.weight", "block_sparse_moe.experts.{}.w3.weight"),
    expert_down="block_sparse_moe.experts.{}.w2.weight",
)
_STACKED = stacked(Layout(choice_bias="mlp.e_score_correction_bias"))
_THETA = 5e6


def read_rotation(fields: Fields, head_dim: int, theta: float) -> Rope:
    """Rotated elements per head: rotary_dim, or partial_rotary_factor if present; all by default. theta: the family's
    default."""
    told = fields.has("partial_rotary_factor") or rope_table(fields).has("partial_rotary_factor")
    rotated = fields.integer("rotary_dim", head_dim, maximum=head_dim)
    partial = 1.0 if told else rotated / head_dim
    return read_rope(fields, fields.integer("max_position_embeddings"), head_dim, theta=theta, partial=partial)


def read_config(fields: Fields, generation: Fields) -> ModelConfig:
    if fields.has("attn_type_list"):
        kinds = fields.integers("attn_type_list", layer_count(fields))
        check_layers(fields, [kind != 1 for kind in kinds], "lightning attention")
    return standard_config(
        fields,
        generation,
        attention_bias=False,
        o_bias=False,
        qk_norm="whole",
        head_dim=128,
        rope=read_rotation(fields, head_sizes(fields, 128)[2], _THETA),
        experts=read_experts(
            fields, intermediate_size="intermediate_size", scores="sigmoid", choice_bias=True, normalised=True
        ),
    )


# Multi-token prediction; the rest is constant in published models.
_GUESSES = frozenset({"use_mtp", "mtp_transformer_layers", "num_mtp_modules"})
_NEUTRAL = {
    "use_qk_norm": True, "qk_norm_type": "per_layer", "use_routing_bias": True, "shared_intermediate_size": 0,
    "scoring_func": "sigmoid",
}  # fmt: skip
MINIMAX_M2 = Family(
    "minimax_m2",
    read_config,
    _LAYOUT.weight_map,
    other_maps=(_STACKED.weight_map,),
    harmless=_GUESSES,
    neutral=_NEUTRAL,
)
