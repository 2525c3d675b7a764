"""Qwen2-VL and Qwen2.5-VL, for text: the decoder is Qwen2's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from llmc.models.config import ModelConfig
from llmc.models.families.family import Family
from llmc.models.families.qwen2 import read_config as read_text
from llmc.models.families.qwen_tower import read_qwen2_tower
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

_LAYOUT = replace(LLAMA_LAYOUT, other_modules=("visual.",))
_WINDOWS = frozenset({"sliding_window", "max_window_layers"})
_SECTIONS = (16, 24, 24)
"""Frequencies of time, height and width in transformers, so that files may omit them."""
_MAX_WINDOW_LAYERS = 80  # where a config does not say


def _text_of(fields: Fields) -> Fields:
    """Published configs have the decoder's fields beside the others, newer ones in a table."""
    return text_fields(fields) if fields.has("text_config") else fields


def read_config(fields: Fields, generation: Fields) -> ModelConfig:
    text = _text_of(fields)
    if not text.has("max_window_layers"):
        text = text.with_values(max_window_layers=_MAX_WINDOW_LAYERS)
    return replace(read_text(with_one_position(text), generation), model_type=fields.text("model_type"))


def _placed(fields: Fields, config: ModelConfig) -> ModelConfig:
    return on_axes(config, _text_of(fields), _SECTIONS)


def _family(model_type: str, tower: Callable[[Fields, ModelConfig], ModelConfig] | None = None) -> Family:
    return Family(
        model_type,
        read_config,
        _LAYOUT.weight_map,
        other_maps=(within(LLAMA_LAYOUT, "visual.").weight_map,),
        harmless=harmless_with_images(_WINDOWS) | _WINDOWS,
        neutral=neutral_with_images({}),
        tower=tower,
        placed=None if tower is None else _placed,
    )


QWEN2_VL, QWEN2_5_VL = _family("qwen2_vl", read_qwen2_tower), _family("qwen2_5_vl")
