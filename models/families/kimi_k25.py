"""Kimi K2.5 to K2.7, for text: the decoder is Kimi K2's."""

from __future__ import annotations

from dataclasses import replace

from llmc.models.config import ModelConfig
from llmc.models.families.deepseek_latent import KIMI_K2, LATENT_LAYOUT, read_v3
from llmc.models.families.family import Family
from llmc.models.families.mixtures import stacked
from llmc.models.families.with_images import harmless_with_images, neutral_with_images, text_fields, within
from llmc.models.fields import Fields
from llmc.models.layout import behind

_OF_IMAGES = ("vision_tower.", "mm_projector.")
_BEHIND = behind(LATENT_LAYOUT, "language_model.")
_LAYOUT = replace(_BEHIND, other_modules=(*_BEHIND.other_modules, *_OF_IMAGES, "model.mm_projector."))
_WITHIN = within(LATENT_LAYOUT, *_OF_IMAGES)


def read_config(fields: Fields, generation: Fields) -> ModelConfig:
    return replace(read_v3(text_fields(fields), generation), model_type=fields.text("model_type"))


_PLACES = frozenset({"ignore_index", "media_placeholder_token_id", "video_placeholder", "use_unified_vision_chunk"})
_PROJECTION = frozenset({"projection_hidden_size", "projection_layer_norm_eps"})
KIMI_K25 = Family(
    "kimi_k25",
    read_config,
    _LAYOUT.weight_map,
    other_maps=(_WITHIN.weight_map, stacked(_WITHIN).weight_map),
    harmless=harmless_with_images(KIMI_K2.harmless) | _PLACES | _PROJECTION,
    neutral=neutral_with_images({}),
)
