"""OLMoE: experts in every layer, q and k normed as a whole."""

from __future__ import annotations

from llmc.models.config import ModelConfig
from llmc.models.errors import ModelError
from llmc.models.families.family import Family
from llmc.models.families.mixtures import read_experts, stacked
from llmc.models.fields import Fields
from llmc.models.layout import LLAMA_LAYOUT
from llmc.models.standard import standard_config


def read_config(fields: Fields, generation: Fields) -> ModelConfig:
    if fields.has("clip_qkv"):
        raise ModelError(f"{fields.origin}: clip_qkv of a model that norms q and k is not supported; remove it")
    bias = fields.flag("attention_bias", False)
    experts = read_experts(
        fields,
        intermediate_size="intermediate_size",
        scores="softmax",
        normalised=fields.flag("norm_topk_prob", False),
    )
    return standard_config(
        fields, generation, attention_bias=bias, o_bias=bias, qk_norm="whole", default_eps=1e-5, experts=experts
    )


OLMOE = Family("olmoe", read_config, LLAMA_LAYOUT.weight_map, other_maps=(stacked().weight_map,))
