"""Qwen3-VL, for text: the decoder is Qwen3's, dense or a mixture of experts."""

from __future__ import annotations

from dataclasses import replace

from llmc.models.config import ModelConfig
from llmc.models.families.family import Family
from llmc.models.families.mixtures import stacked
from llmc.models.families.qwen3 import read_config as read_dense
from llmc.models.families.qwen_moe import read_qwen3 as read_mixture
from llmc.models.families.qwen_tower import read_qwen3_tower, stacked_on
from llmc.models.families.with_images import (
    harmless_with_images,
    neutral_with_images,
    on_axes,
    text_fields,
    with_one_position,
    within,
)
from llmc.models.fields import Fields
from llmc.models.layout import LLAMA_LAYOUT

_LAYOUT = within(LLAMA_LAYOUT, "visual.")
_STACKED = within(stacked(), "visual.")
_SECTIONS = (24, 20, 20)
"""Frequencies of time, height and width in transformers, so that files may omit them."""
# As the authors publish them.
_TURNED = replace(_STACKED, experts_turned=True)


def read_config(fields: Fields, generation: Fields) -> ModelConfig:
    text = with_one_position(text_fields(fields))
    return replace(read_dense(text, generation), model_type=fields.text("model_type"))


def read_moe_config(fields: Fields, generation: Fields) -> ModelConfig:
    """Weights of a token's experts are normalised, whatever norm_topk_prob is."""
    text = with_one_position(text_fields(fields)).with_values(norm_topk_prob=True)
    return replace(read_mixture(text, generation), model_type=fields.text("model_type"))


def _placed(fields: Fields, config: ModelConfig) -> ModelConfig:
    return stacked_on(on_axes(config, text_fields(fields), _SECTIONS, by_turns=True), fields)


QWEN3_VL = Family(
    "qwen3_vl",
    read_config,
    _LAYOUT.weight_map,
    harmless=harmless_with_images(frozenset()),
    neutral=neutral_with_images({}),
    tower=read_qwen3_tower,
    placed=_placed,
)
QWEN3_VL_MOE = Family(
    "qwen3_vl_moe",
    read_moe_config,
    _TURNED.weight_map,
    other_maps=(_STACKED.weight_map, _LAYOUT.weight_map),
    harmless=harmless_with_images(frozenset()),
    neutral=neutral_with_images({"norm_topk_prob": True}),
    tower=read_qwen3_tower,
    placed=_placed,
)
