"""Qwen1.5-MoE, Qwen2-57B-A14B and Qwen3 MoE: experts in some layers; Qwen2's have a shared expert."""

from __future__ import annotations

from llmc.models.config import ModelConfig
from llmc.models.families.family import Family
from llmc.models.families.mixtures import read_experts, sparse_layers, stacked
from llmc.models.fields import Fields
from llmc.models.layout import LLAMA_LAYOUT
from llmc.models.standard import standard_config
from llmc.models.windows import by_layer, everywhere, used_window


def read_qwen2(fields: Fields, generation: Fields) -> ModelConfig:
    """Without layer_types, every other layer below max_window_layers has a window, as transformers has it."""

    def has_window(layer: int) -> bool:
        used = fields.flag("use_sliding_window", False)
        return used and layer % 2 == 0 and layer < fields.integer("max_window_layers", 28, minimum=0)

    experts = read_experts(
        fields,
        intermediate_size="moe_intermediate_size",
        layers=sparse_layers(fields),
        scores="softmax",
        normalised=fields.flag("norm_topk_prob", False),
        shared_size=fields.integer("shared_expert_intermediate_size"),
        shared_gate=True,
    )
    return standard_config(
        fields,
        generation,
        attention_bias=fields.flag("qkv_bias", True),
        o_bias=False,
        layer_windows=by_layer(fields, used_window(fields), has_window),
        experts=experts,
    )


def read_qwen3(fields: Fields, generation: Fields) -> ModelConfig:
    """A window applies to all layers."""
    bias = fields.flag("attention_bias", False)
    experts = read_experts(
        fields,
        intermediate_size="moe_intermediate_size",
        layers=sparse_layers(fields),
        scores="softmax",
        normalised=fields.flag("norm_topk_prob", False),
    )
    return standard_config(
        fields,
        generation,
        attention_bias=bias,
        o_bias=bias,
        qk_norm="head",
        layer_windows=everywhere(fields, used_window(fields)),
        experts=experts,
    )


_OTHERS = (stacked().weight_map,)
# Read if use_sliding_window is true.
_WINDOWS = frozenset({"sliding_window", "max_window_layers"})
QWEN2_MOE = Family("qwen2_moe", read_qwen2, LLAMA_LAYOUT.weight_map, other_maps=_OTHERS, harmless=_WINDOWS)
QWEN3_MOE = Family(
    "qwen3_moe",
    read_qwen3,
    LLAMA_LAYOUT.weight_map,
    other_maps=_OTHERS,
    harmless=_WINDOWS,
    neutral={"qkv_bias": False, "shared_expert_intermediate_size": 0, "use_qk_norm": True},
)
