"""Granite: Llama with multipliers on embeddings, residuals, scores and logits; also with experts, some of which all
tokens share. Granite 4 (granitemoehybrid) has Mamba-2 mixers in some layers. HyperCLOVA X has norms after the blocks,
too."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from llmc.models.brief import brief
from llmc.models.config import Experts, ModelConfig
from llmc.models.errors import ModelError
from llmc.models.families.family import Family
from llmc.models.families.layer_kinds import LINEAR, OLD_NAMES, read_layer_types
from llmc.models.families.mamba import OF_MIXERS, read_mixers
from llmc.models.families.mixtures import apart, read_experts, stacked
from llmc.models.fields import Fields
from llmc.models.layout import Layout
from llmc.models.rotary import NO_ROPE
from llmc.models.standard import head_sizes, layer_count, standard_config
from llmc.models.weight_map import WeightMap

_MIXTURE = Layout(
    router="block_sparse_moe.router.layer",
    expert_gate_up=("block_sparse_moe.input_linear.weight",),
    expert_down="block_sparse_moe.output_linear.weight",
    shared="shared_mlp",
    shared_gate_up=("input_linear",),
    shared_down="output_linear",
)
_EXPERTS = "block_sparse_moe.experts"
_RENAMED = stacked(replace(_MIXTURE, router="block_sparse_moe.router"), _EXPERTS)
_APART = tuple(apart(layout, _EXPERTS) for layout in (_MIXTURE, _RENAMED))
_OTHER_MAPS = tuple(layout.weight_map for layout in (_RENAMED, *_APART))
# Without experts, every token takes the shared block.
_PLAIN = Layout(gate_up=("shared_mlp.input_linear",), down="shared_mlp.output_linear")
_NORMED = Layout(post_attention_norm="post_norm1", post_mlp_norm="post_norm2")


def _read(fields: Fields, generation: Fields, **more: Any) -> ModelConfig:
    """logits_scaling is a divisor."""
    bias = fields.flag("attention_bias", False)
    return standard_config(
        fields,
        generation,
        attention_bias=bias,
        o_bias=bias,
        mlp_bias=fields.flag("mlp_bias", False),
        embedding_multiplier=fields.number("embedding_multiplier", 1.0),
        residual_multiplier=fields.number("residual_multiplier", 1.0),
        **{
            "attention_scale": fields.number("attention_multiplier", 1.0),
            "logit_multiplier": 1.0 / fields.number("logits_scaling", 1.0),
            **more,
        },
    )


def read_config(fields: Fields, generation: Fields) -> ModelConfig:
    return _read(fields, generation)


def _experts(fields: Fields, shared_size: int = 0) -> Experts:
    """A softmax over the chosen logits equals the normalised softmax over all."""
    return read_experts(
        fields, intermediate_size="intermediate_size", scores="softmax", normalised=True, shared_size=shared_size
    )


def read_mixture(fields: Fields, generation: Fields) -> ModelConfig:
    return _read(fields, generation, experts=_experts(fields))


def _shared_size(fields: Fields, usual: int) -> int:
    return fields.integer("shared_intermediate_size", usual, minimum=0)


def read_shared(fields: Fields, generation: Fields) -> ModelConfig:
    return _read(fields, generation, experts=_experts(fields, _shared_size(fields, 0)))


def read_hybrid(fields: Fields, generation: Fields) -> ModelConfig:
    """Without position_embedding_type, layers have no positions. Without layer types, all have mixers."""
    fields = fields.renamed(layer_types="layers_block_type")
    kinds = read_layer_types(fields, [LINEAR] * layer_count(fields), old_names=OLD_NAMES)
    mixers = tuple(i for i, kind in enumerate(kinds) if kind == LINEAR)
    kind = fields.text("position_embedding_type", "nope")
    if kind not in ("rope", "nope"):
        raise ModelError(f"{fields.origin}: position_embedding_type {brief(kind)} is not one of rope, nope")
    shared = _shared_size(fields, 1024)
    mamba = read_mixers(fields, mixers) if mixers else None
    if fields.integer("num_local_experts", 8, minimum=0):
        config = _read(fields, generation, experts=_experts(fields, shared), mamba=mamba)
    else:
        config = _read(fields.with_values(intermediate_size=shared), generation, mamba=mamba)
    return config if kind == "rope" else replace(config, rope=NO_ROPE)


def read_hyperclovax(fields: Fields, generation: Fields) -> ModelConfig:
    """logits_scaling is a factor."""
    scale = fields.number("attention_multiplier", head_sizes(fields)[2] ** -0.5)
    return _read(
        fields,
        generation,
        attention_scale=scale,
        logit_multiplier=fields.number("logits_scaling", 1.0),
        residual="sandwich" if fields.flag("use_post_norm", True) else "pre",
    )


def hybrid_weight_map(config: ModelConfig) -> WeightMap:
    return (_PLAIN if config.experts is None else _MIXTURE).weight_map(config)


GRANITE = Family("granite", read_config)
GRANITEMOE = Family("granitemoe", read_mixture, _MIXTURE.weight_map, other_maps=_OTHER_MAPS)
GRANITEMOESHARED = Family("granitemoeshared", read_shared, _MIXTURE.weight_map, other_maps=_OTHER_MAPS)
# Read where there are experts.
_OF_EXPERTS = frozenset({"intermediate_size", "num_experts_per_tok"})
GRANITEMOEHYBRID = Family(
    "granitemoehybrid",
    read_hybrid,
    hybrid_weight_map,
    other_maps=(_RENAMED.weight_map,),
    harmless=OF_MIXERS | _OF_EXPERTS | {"init_method"},
    neutral={"normalization_function": "rmsnorm"},
)
HYPERCLOVAX = Family("hyperclovax", read_hyperclovax, _NORMED.weight_map)
