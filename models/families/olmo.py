"""OLMo: norms without weights, clipped q, k and v. OLMo 2: norms after blocks, q and k normed as a whole."""

from __future__ import annotations

from llmc.models.config import ModelConfig
from llmc.models.families.family import Family
from llmc.models.fields import Fields
from llmc.models.layout import Layout
from llmc.models.standard import standard_config

_EPS = 1e-5  # not stated in config.json


def read_config(fields: Fields, generation: Fields) -> ModelConfig:
    bias = fields.flag("attention_bias", False)
    return standard_config(
        fields,
        generation,
        attention_bias=bias,
        o_bias=bias,
        eps="layer_norm_eps",
        default_eps=_EPS,
        norm="layer",
        norm_weight=False,
        clip_qkv=fields.number("clip_qkv") if fields.has("clip_qkv") else None,
    )


def read_config_2(fields: Fields, generation: Fields) -> ModelConfig:
    bias = fields.flag("attention_bias", False)
    return standard_config(
        fields, generation, attention_bias=bias, o_bias=bias, qk_norm="whole", default_eps=_EPS, residual="post"
    )


OLMO = Family("olmo", read_config)
OLMO2 = Family("olmo2", read_config_2, Layout().weight_map)
