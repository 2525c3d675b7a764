"""Mixtral: Mistral with experts in every layer."""

from __future__ import annotations

from llmc.models.config import ModelConfig
from llmc.models.families.family import Family
from llmc.models.families.mixtures import read_experts, stacked
from llmc.models.fields import Fields
from llmc.models.layout import Layout
from llmc.models.standard import standard_config
from llmc.models.windows import everywhere, stated_window

LAYOUT = Layout(
    router="block_sparse_moe.gate",
    expert_gate_up=("block_sparse_moe.experts.{}.w1.weight", "block_sparse_moe.experts.{}.w3.weight"),
    expert_down="block_sparse_moe.experts.{}.w2.weight",
)


def read_config(fields: Fields, generation: Fields) -> ModelConfig:
    experts = read_experts(fields, intermediate_size="intermediate_size", scores="softmax", normalised=True)
    windows = everywhere(fields, stated_window(fields))
    return standard_config(
        fields, generation, attention_bias=False, o_bias=False, layer_windows=windows, experts=experts
    )


MIXTRAL = Family("mixtral", read_config, LAYOUT.weight_map, other_maps=(stacked().weight_map,))
