"""Families that differ from Llama only in a config field or two."""

from __future__ import annotations

from llmc.models.config import ModelConfig
from llmc.models.families.family import Family
from llmc.models.fields import Fields
from llmc.models.layout import Layout
from llmc.models.mtp_layout import MIMO_MTP
from llmc.models.rope_fields import read_rope
from llmc.models.standard import (
    head_sizes,
    layer_count,
    read_activation,
    standard_config,
)
from llmc.models.windows import by_layer, from_layer, stated_window, used_window

_INTERLEAVED = Layout(interleaved=True)


def read_arcee(fields: Fields, generation: Fields) -> ModelConfig:
    """A plain MLP with squared ReLU."""
    bias = fields.flag("attention_bias", False)
    return standard_config(
        fields,
        generation,
        attention_bias=bias,
        o_bias=bias,
        mlp_bias=fields.flag("mlp_bias", False),
        activation=read_activation(fields, default="relu2"),
        gated=False,
    )


def read_cwm(fields: Fields, generation: Fields) -> ModelConfig:
    """Windows."""
    windows = by_layer(fields, stated_window(fields, 8192), lambda layer: layer % 4 != 0)
    return standard_config(fields, generation, attention_bias=False, o_bias=False, layer_windows=windows)


def read_ernie(fields: Fields, generation: Fields) -> ModelConfig:
    """Interleaved rotation."""
    bias = fields.flag("use_bias", False)
    return standard_config(
        fields, generation, attention_bias=bias, o_bias=bias, mlp_bias=bias, head_dim=128, tie_word_embeddings=True
    )


def read_helium(fields: Fields, generation: Fields) -> ModelConfig:
    """Interleaved rotation."""
    return standard_config(
        fields,
        generation,
        attention_bias=fields.flag("attention_bias", False),
        o_bias=False,
        mlp_bias=fields.flag("mlp_bias", False),
        head_dim=128,
    )


def read_jais_2(fields: Fields, generation: Fields) -> ModelConfig:
    """Layer norms, biases, and a plain MLP with squared ReLU."""
    bias = fields.flag("attention_bias", True)
    return standard_config(
        fields,
        generation,
        attention_bias=bias,
        o_bias=bias,
        mlp_bias=fields.flag("mlp_bias", True),
        eps="layer_norm_eps",
        activation=read_activation(fields, default="relu2"),
        norm="layer",
        norm_bias=True,
        gated=False,
    )


def read_mimo(fields: Fields, generation: Fields) -> ModelConfig:
    """Qwen2 plus multi-token prediction layers."""
    windows = from_layer(fields, used_window(fields), 28)
    return standard_config(fields, generation, attention_bias=True, o_bias=False, layer_windows=windows)


def read_minicpm(fields: Fields, generation: Fields) -> ModelConfig:
    """Multipliers on embeddings and residuals; logits are divided by hidden_size / dim_model_base."""
    bias = fields.flag("attention_bias", False)
    return standard_config(
        fields,
        generation,
        attention_bias=bias,
        o_bias=bias,
        default_eps=1e-6,
        tie_word_embeddings=True,
        embedding_multiplier=fields.number("scale_emb", 1.0),
        residual_multiplier=fields.number("scale_depth", 1.0) / layer_count(fields) ** 0.5,
        logit_multiplier=fields.number("dim_model_base", 1.0) / fields.integer("hidden_size"),
    )


def read_nemotron(fields: Fields, generation: Fields) -> ModelConfig:
    """Layer norm weights stored minus 1, half of each head rotated, a plain MLP with squared ReLU."""
    bias = fields.flag("attention_bias", False)
    positions = fields.integer("max_position_embeddings")
    return standard_config(
        fields,
        generation,
        attention_bias=bias,
        o_bias=bias,
        mlp_bias=fields.flag("mlp_bias", False),
        eps="norm_eps",
        activation=read_activation(fields, default="relu2"),
        rope=read_rope(fields, positions, head_sizes(fields)[2], partial=0.5),
        norm="layer",
        norm_bias=True,
        gated=False,
    )


def read_orion(fields: Fields, generation: Fields) -> ModelConfig:
    """Layer norms."""
    bias = fields.flag("attention_bias", False)
    return standard_config(fields, generation, attention_bias=bias, o_bias=bias, norm="layer", norm_bias=True)


def read_seed_oss(fields: Fields, generation: Fields) -> ModelConfig:
    """Biases of q, k and v, and of the output projection, are set separately."""
    return standard_config(
        fields,
        generation,
        attention_bias=fields.flag("attention_bias", True),
        o_bias=fields.flag("attention_out_bias", False),
        mlp_bias=fields.flag("mlp_bias", False),
        head_dim=128,
    )


def read_plain(fields: Fields, generation: Fields) -> ModelConfig:
    """Equal to Llama, without biases."""
    return standard_config(fields, generation, attention_bias=False, o_bias=False)


AQUILA = Family("aquila", read_plain)
ARCEE = Family("arcee", read_arcee)
CWM = Family("cwm", read_cwm)
ERNIE4_5 = Family("ernie4_5", read_ernie, _INTERLEAVED.weight_map)
HELIUM = Family("helium", read_helium, _INTERLEAVED.weight_map)
JAIS2 = Family("jais2", read_jais_2)
MIMO = Family(
    "mimo",
    read_mimo,
    Layout(other_modules=("model.mtp_layers.",)).weight_map,
    harmless=frozenset({"sliding_window", "max_window_layers", "num_nextn_predict_layers"}),
    neutral={"attention_bias": True},
    mtp=MIMO_MTP,
)
# mup_denominator: of drafting heads, which have fewer layers than the model.
MINICPM = Family("minicpm", read_minicpm, harmless=frozenset({"mup_denominator"}), neutral={"num_experts": 0})
# Names of rotary share and head_dim in tools of the first checkpoints; shapes determine the latter.
NEMOTRON = Family(
    "nemotron",
    read_nemotron,
    Layout(norm_plus=1.0).weight_map,
    harmless=frozenset({"kv_channels"}),
    neutral={"rope_percent": 0.5},
)
ORION = Family("orion", read_orion)
SEED_OSS = Family("seed_oss", read_seed_oss)
XVERSE = Family("xverse", read_plain, harmless=frozenset({"max_tokenizer_truncation"}))
