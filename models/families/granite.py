"""Granite: Llama with multipliers on embeddings, residuals, scores and logits; also with experts."""

from __future__ import annotations

from llmc.models.config import Experts, ModelConfig
from llmc.models.families.family import Family
from llmc.models.families.mixtures import apart, read_experts, stacked
from llmc.models.fields import Fields
from llmc.models.layout import Layout
from llmc.models.standard import standard_config

_MIXTURE = Layout(
    router="block_sparse_moe.router.layer",
    expert_gate_up=("block_sparse_moe.input_linear.weight",),
    expert_down="block_sparse_moe.output_linear.weight",
)
_EXPERTS = "block_sparse_moe.experts"
_RENAMED = stacked(Layout(router="block_sparse_moe.router"), _EXPERTS)
_APART = tuple(apart(layout, _EXPERTS) for layout in (_MIXTURE, _RENAMED))


def read_config(fields: Fields, generation: Fields, experts: Experts | None = None) -> ModelConfig:
    """logits_scaling is a divisor."""
    bias = fields.flag("attention_bias", False)
    return standard_config(
        fields,
        generation,
        attention_bias=bias,
        o_bias=bias,
        mlp_bias=fields.flag("mlp_bias", False),
        attention_scale=fields.number("attention_multiplier", 1.0),
        embedding_multiplier=fields.number("embedding_multiplier", 1.0),
        residual_multiplier=fields.number("residual_multiplier", 1.0),
        logit_multiplier=1.0 / fields.number("logits_scaling", 1.0),
        experts=experts,
    )


def read_mixture(fields: Fields, generation: Fields) -> ModelConfig:
    """A softmax over the chosen logits equals the normalised softmax over all."""
    experts = read_experts(fields, intermediate_size="intermediate_size", scores="softmax", normalised=True)
    return read_config(fields, generation, experts)


GRANITE = Family("granite", read_config)
GRANITEMOE = Family(
    "granitemoe",
    read_mixture,
    _MIXTURE.weight_map,
    other_maps=tuple(layout.weight_map for layout in (_RENAMED, *_APART)),
)
