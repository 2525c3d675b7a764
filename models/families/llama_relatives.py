"""Families that differ from Llama in a field or two of config.json."""

from __future__ import annotations

from llmc.models.config import ModelConfig
from llmc.models.families.family import Family
from llmc.models.fields import Fields
from llmc.models.layout import Layout
from llmc.models.rope_fields import read_rope
from llmc.models.standard import head_sizes, read_activation, standard_config

_INTERLEAVED = Layout(interleaved=True)


def read_arcee(fields: Fields, generation: Fields) -> ModelConfig:
    """A plain MLP with a squared ReLU."""
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


def read_ernie(fields: Fields, generation: Fields) -> ModelConfig:
    """Neighbours in a head are rotated together."""
    bias = fields.flag("use_bias", False)
    return standard_config(
        fields, generation, attention_bias=bias, o_bias=bias, mlp_bias=bias, head_dim=128, tie_word_embeddings=True
    )


def read_helium(fields: Fields, generation: Fields) -> ModelConfig:
    """Neighbours in a head are rotated together."""
    return standard_config(
        fields,
        generation,
        attention_bias=fields.flag("attention_bias", False),
        o_bias=False,
        mlp_bias=fields.flag("mlp_bias", False),
        head_dim=128,
    )


def read_nemotron(fields: Fields, generation: Fields) -> ModelConfig:
    """Layer norms whose weights are less one, half of each head rotated, a plain MLP with a squared ReLU."""
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


def read_seed_oss(fields: Fields, generation: Fields) -> ModelConfig:
    """Biases of q, k and v apart from that of the output projection."""
    return standard_config(
        fields,
        generation,
        attention_bias=fields.flag("attention_bias", True),
        o_bias=fields.flag("attention_out_bias", False),
        mlp_bias=fields.flag("mlp_bias", False),
        head_dim=128,
    )


ARCEE = Family("arcee", read_arcee)
ERNIE4_5 = Family("ernie4_5", read_ernie, _INTERLEAVED.weight_map)
HELIUM = Family("helium", read_helium, _INTERLEAVED.weight_map)
# Names of the share that is rotated and of head_dim in what made the first checkpoints; shapes tell the latter.
NEMOTRON = Family(
    "nemotron",
    read_nemotron,
    Layout(norm_plus=1.0).weight_map,
    harmless=frozenset({"kv_channels"}),
    neutral={"rope_percent": 0.5},
)
SEED_OSS = Family("seed_oss", read_seed_oss)
