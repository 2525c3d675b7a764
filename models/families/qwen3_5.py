"""Qwen3.5 and Qwen3.6, for text: Qwen3-Next's layers, dense or a mixture of experts.

model_types `qwen3_5_text` and `qwen3_5_moe_text` are the decoders alone; the others also read images.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from llmc.models.config import ModelConfig
from llmc.models.families.family import Family
from llmc.models.families.mixtures import read_experts, stacked
from llmc.models.families.qwen3_next import LAYOUT, OF_LINEAR, gated_config
from llmc.models.families.qwen_tower import read_qwen3_tower
from llmc.models.families.with_images import (
    harmless_with_images,
    neutral_with_images,
    on_axes,
    text_fields,
    with_one_position,
    within,
)
from llmc.models.fields import Fields
from llmc.models.mtp_layout import QWEN_MTP

_STACKED = stacked(LAYOUT)
_WITHIN, _STACKED_WITHIN = (within(layout, "visual.") for layout in (LAYOUT, _STACKED))
_SECTIONS = (11, 11, 10)
"""Frequencies of time, height and width in transformers, so that files may omit them."""
Reader = Callable[[Fields, Fields], ModelConfig]


def read_dense(fields: Fields, generation: Fields) -> ModelConfig:
    return gated_config(with_one_position(fields), generation, None)


def read_mixture(fields: Fields, generation: Fields) -> ModelConfig:
    """Every layer has experts."""
    experts = read_experts(
        fields,
        intermediate_size="moe_intermediate_size",
        scores="softmax",
        normalised=True,
        shared_size=fields.integer("shared_expert_intermediate_size", 512),
        shared_gate=True,
    )
    return gated_config(with_one_position(fields), generation, experts)


def _behind_images(read: Reader) -> Reader:
    def read_config(fields: Fields, generation: Fields) -> ModelConfig:
        return replace(read(text_fields(fields), generation), model_type=fields.text("model_type"))

    return read_config


def _placed(fields: Fields, config: ModelConfig) -> ModelConfig:
    return on_axes(config, text_fields(fields), _SECTIONS, by_turns=True)


# Multi-token prediction, and the type of states of linear attention.
_HARMLESS = OF_LINEAR | {"mamba_ssm_dtype", "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"}
# That servers read no images.
_OF_SERVERS = frozenset({"language_model_only"})
_NEUTRAL = {"attn_output_gate": True, "mlp_only_layers": [], "output_gate_type": "swish"}
QWEN3_5_TEXT = Family("qwen3_5_text", read_dense, LAYOUT.weight_map, harmless=_HARMLESS, neutral=_NEUTRAL, mtp=QWEN_MTP)
QWEN3_5_MOE_TEXT = Family(
    "qwen3_5_moe_text",
    read_mixture,
    LAYOUT.weight_map,
    other_maps=(_STACKED.weight_map,),
    harmless=_HARMLESS,
    neutral=_NEUTRAL,
    mtp=QWEN_MTP,
)
QWEN3_5 = Family(
    "qwen3_5",
    _behind_images(read_dense),
    _WITHIN.weight_map,
    harmless=harmless_with_images(_HARMLESS) | _OF_SERVERS,
    neutral=neutral_with_images(_NEUTRAL),
    mtp=QWEN_MTP,
    tower=read_qwen3_tower,
    placed=_placed,
)
QWEN3_5_MOE = Family(
    "qwen3_5_moe",
    _behind_images(read_mixture),
    _WITHIN.weight_map,
    other_maps=(_STACKED_WITHIN.weight_map,),
    harmless=harmless_with_images(_HARMLESS) | _OF_SERVERS,
    neutral=neutral_with_images(_NEUTRAL),
    mtp=QWEN_MTP,
    tower=read_qwen3_tower,
    placed=_placed,
)
