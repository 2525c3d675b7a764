"""OLMo: norms without weights, clipped q, k and v. OLMo 2: norms after blocks, q and k normed as a whole. OLMo 3: the
same with windows, in whose layers rotation is not scaled."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from llmc.models.config import ModelConfig
from llmc.models.families.family import Family
from llmc.models.fields import Fields
from llmc.models.layout import Layout
from llmc.models.rope_fields import read_rope, rope_of, rope_table
from llmc.models.rotary import Rope
from llmc.models.standard import head_sizes, standard_config
from llmc.models.windows import all_but, stated_window

_EPS = 1e-5  # not stated in config.json
_PERIOD, _THETA = 4, 500000.0  # of OLMo 3; the last layer of a period has no window


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


def _read_2(fields: Fields, generation: Fields, **more: Any) -> ModelConfig:
    bias = fields.flag("attention_bias", False)
    return standard_config(
        fields, generation, attention_bias=bias, o_bias=bias, qk_norm="whole", default_eps=_EPS, residual="post", **more
    )


def read_config_2(fields: Fields, generation: Fields) -> ModelConfig:
    return _read_2(fields, generation)


def _ropes(fields: Fields) -> tuple[Rope, Rope]:
    """(of layers without a window, of layers with one)."""
    positions, head_dim, table = fields.integer("max_position_embeddings"), head_sizes(fields)[2], rope_table(fields)
    whole, local = table.table("full_attention"), table.table("sliding_attention")
    if whole is not None and local is not None:
        return (
            rope_of(fields, whole, positions, head_dim, theta=_THETA),
            rope_of(fields, local, positions, head_dim, theta=_THETA),
        )
    rope = read_rope(fields, positions, head_dim, theta=_THETA)
    return rope, replace(rope, scaling=None)


def read_config_3(fields: Fields, generation: Fields) -> ModelConfig:
    windows = all_but(fields, stated_window(fields, 4096), _PERIOD)
    rope, local = _ropes(fields)
    return _read_2(fields, generation, layer_windows=windows, rope=rope, local_rope=local)


OLMO = Family("olmo", read_config)
OLMO2 = Family("olmo2", read_config_2, Layout().weight_map)
OLMO3 = Family("olmo3", read_config_3, Layout().weight_map)
