"""DBRX: layer norms without bias, clipped q, k and v, a layer's experts in one matrix."""

from __future__ import annotations

from llmc.models.brief import brief
from llmc.models.config import ModelConfig
from llmc.models.errors import ModelError
from llmc.models.families.family import Family
from llmc.models.families.mixtures import apart, read_experts
from llmc.models.fields import Fields
from llmc.models.known_keys import HARMLESS, NEUTRAL, nested
from llmc.models.layout import Layout
from llmc.models.rope_fields import read_rope
from llmc.models.standard import head_sizes, layer_count, standard_config

_EXPERTS = "ffn.experts.mlp"
_LAYOUT = Layout(
    embed="transformer.wte",
    layer="transformer.blocks.{}",
    attention_norm="norm_attn_norm.norm_1",
    qkv=("norm_attn_norm.attn.Wqkv",),
    out="norm_attn_norm.attn.out_proj",
    mlp_norm="norm_attn_norm.norm_2",
    router="ffn.router.layer",
    expert_gate_up=(f"{_EXPERTS}.w1", f"{_EXPERTS}.v1"),
    expert_down=f"{_EXPERTS}.w2",
    experts_joined=True,
    down_turned=True,
    norm="transformer.norm_f",
    unused=(),
)


def _activation(inner: Fields) -> object:
    found = inner.raw("ffn_act_fn", "silu")
    return found.get("name") if isinstance(found, dict) and len(found) == 1 else found


def read_config(fields: Fields, generation: Fields) -> ModelConfig:
    """moe_normalize_expert_weights: the p of the norm that divides the weights; 1, or null for none."""
    fields = fields.renamed(
        hidden_size="d_model",
        num_attention_heads="n_heads",
        num_hidden_layers="n_layers",
        max_position_embeddings="max_seq_len",
    )
    attention = fields.table("attn_config") or Fields({}, f"{fields.origin}: attn_config")
    inner = fields.table("ffn_config") or Fields({}, f"{fields.origin}: ffn_config")
    if (activation := _activation(inner)) != "silu":
        raise ModelError(f"{inner.origin}: ffn_act_fn {brief(activation)} is not supported")
    power = 1.0 if not inner.mentions("moe_normalize_expert_weights") else inner.raw("moe_normalize_expert_weights", 0)
    if power not in (0, 1):
        raise ModelError(f"{inner.origin}: moe_normalize_expert_weights {brief(power)} is not 1 or null")
    heads = {"num_key_value_heads": attention.integer("kv_n_heads", 1)}
    theta = {"rope_theta": attention.number("rope_theta")} if attention.has("rope_theta") else {}
    fields = fields.with_values(**heads, **theta)
    experts = read_experts(
        inner.renamed(num_experts_per_tok="moe_top_k"),
        intermediate_size="ffn_hidden_size",
        layers=tuple(range(layer_count(fields))),
        scores="softmax",
        normalised=power == 1,
    )
    return standard_config(
        fields.with_values(layer_norm_epsilon=1e-5),
        generation,
        attention_bias=False,
        o_bias=False,
        eps="layer_norm_epsilon",
        activation="silu",
        intermediate_size=experts.intermediate_size,
        rope=read_rope(fields, fields.integer("max_position_embeddings"), head_sizes(fields)[2]),
        clip_qkv=attention.number("clip_qkv") if attention.has("clip_qkv") else None,
        norm="layer",
        experts=experts,
    )


# Training options; the width equals the model's.
_OF_EXPERTS = HARMLESS | {"moe_jitter_eps", "moe_loss_weight", "hidden_size", "model_type"}
DBRX = Family(
    "dbrx",
    read_config,
    _LAYOUT.weight_map,
    other_maps=(apart(_LAYOUT, _EXPERTS, ("w1", "v1", "w2")).weight_map,),
    harmless=frozenset({"emb_pdrop", "num_key_value_heads"})
    | nested("attn_config", HARMLESS | {"model_type"})
    | nested("ffn_config", _OF_EXPERTS),
    neutral={
        **{f"{table}.{name}": value for table in ("attn_config", "ffn_config") for name, value in NEUTRAL.items()},
        "ffn_config.uniform_expert_assignment": False,
    },
)
