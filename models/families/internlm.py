"""InternLM: Llama with biases. InternLM2: q, k and v interleaved by group. InternLM3: Llama."""

from __future__ import annotations

from llmc.models.config import ModelConfig
from llmc.models.errors import ModelError
from llmc.models.families.family import Family
from llmc.models.fields import Fields
from llmc.models.layout import Layout
from llmc.models.row_orders import by_group
from llmc.models.standard import standard_config

_LAYOUT_2 = Layout(
    embed="model.tok_embeddings",
    attention_norm="attention_norm",
    qkv=("attention.wqkv",),
    qkv_rows=by_group,
    out="attention.wo",
    mlp_norm="ffn_norm",
    gate_up=("feed_forward.w1", "feed_forward.w3"),
    down="feed_forward.w2",
    head="output",
)


def read_config(fields: Fields, generation: Fields) -> ModelConfig:
    """rotary: the base, and type "origin", or "dynamic" with a factor (default 1)."""
    bias = fields.flag("bias", True)
    rotary = fields.table("rotary")
    if rotary is not None:
        if (kind := rotary.text("type", "origin")) not in ("origin", "dynamic"):
            raise ModelError(f"{rotary.origin}: type {kind!r} is not one of origin, dynamic")
        scaling = {"rope_type": kind, "factor": rotary.number("scaling_factor", 1.0)} if kind == "dynamic" else None
        fields = fields.with_values(rope_theta=rotary.number("base", 10000.0), rope_scaling=scaling)
    return standard_config(fields, generation, attention_bias=bias, o_bias=bias, default_eps=1e-6)


def read_config_2(fields: Fields, generation: Fields) -> ModelConfig:
    if fields.has("reward_token_id"):
        raise ModelError(f"{fields.origin}: a reward model (reward_token_id) has no next token and is not supported")
    bias = fields.flag("bias", True)
    return standard_config(fields, generation, attention_bias=bias, o_bias=bias, default_eps=1e-6)


def read_config_3(fields: Fields, generation: Fields) -> ModelConfig:
    """bias: of all matrices except q, k and v."""
    fields = fields.renamed(attention_bias="qkv_bias", mlp_bias="bias")
    bias = fields.flag("mlp_bias", False)
    return standard_config(
        fields,
        generation,
        attention_bias=fields.flag("attention_bias", False),
        o_bias=bias,
        mlp_bias=bias,
        head_dim=128,
        default_eps=1e-5,
    )


INTERNLM = Family("internlm", read_config)
INTERNLM2 = Family("internlm2", read_config_2, _LAYOUT_2.weight_map)
INTERNLM3 = Family("internlm3", read_config_3)
