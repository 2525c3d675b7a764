"""Qwen3-VL, for text: the decoder is Qwen3's. A text's tokens have one position in time, height and width, so that the
rotary positions of images (mrope) are those of every decoder."""

from __future__ import annotations

from dataclasses import replace

from llmc.models.config import ModelConfig
from llmc.models.families.family import Family
from llmc.models.families.qwen3 import read_config as read_text
from llmc.models.families.with_images import harmless_with_images, neutral_with_images, text_fields
from llmc.models.fields import Fields
from llmc.models.known_keys import nested
from llmc.models.layout import LLAMA_LAYOUT, behind, without

_LAYOUT = replace(
    behind(without(LLAMA_LAYOUT, "model."), "model.language_model."), head="lm_head", other_modules=("model.visual.",)
)


def read_config(fields: Fields, generation: Fields) -> ModelConfig:
    return replace(read_text(text_fields(fields), generation), model_type=fields.text("model_type"))


# How elements of a head are shared between time, height and width.
_SHARES = ("mrope_section", "mrope_interleaved")
_OF_POSITIONS = nested("rope_parameters", _SHARES) | nested("rope_scaling", _SHARES)
QWEN3_VL = Family(
    "qwen3_vl",
    read_config,
    _LAYOUT.weight_map,
    harmless=harmless_with_images(_OF_POSITIONS),
    neutral=neutral_with_images({}),
)
