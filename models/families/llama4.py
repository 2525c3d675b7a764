"""Llama 4: chunked attention in rotated layers, heads normed after rotation; in others queries grow with position.

A token uses a shared expert and one routed expert, whose input is scaled by the router's score. model_type
`llama4_text` is the decoder alone; `llama4` also reads images, and llmc has its decoder.
"""

from __future__ import annotations

from dataclasses import replace

from llmc.models.config import ModelConfig, QueryGrowth
from llmc.models.errors import ModelError
from llmc.models.families.family import Family
from llmc.models.families.mixtures import apart, read_experts
from llmc.models.families.with_images import harmless_with_images, neutral_with_images, text_fields
from llmc.models.fields import Fields
from llmc.models.layout import Layout, behind
from llmc.models.rope_fields import read_rope
from llmc.models.standard import head_sizes, layer_count, standard_config

_BLOCK = "feed_forward"
_LAYOUT = Layout(
    interleaved=True,
    gate_up=(f"{_BLOCK}.gate_proj", f"{_BLOCK}.up_proj"),
    down=f"{_BLOCK}.down_proj",
    router=f"{_BLOCK}.router",
    expert_gate_up=(f"{_BLOCK}.experts.gate_up_proj",),
    expert_down=f"{_BLOCK}.experts.down_proj",
    experts_turned=True,
    shared=f"{_BLOCK}.shared_expert",
)
_WITH_IMAGES = replace(behind(_LAYOUT, "language_model."), other_modules=("vision_model.", "multi_modal_projector."))
_HEAD_DIM, _THETA = 128, 500000.0


def _rotated(fields: Fields) -> tuple[bool, ...]:
    """Whether each layer is rotated, which no_rope_layers marks by 1."""
    count = layer_count(fields)
    if fields.has("no_rope_layers") and fields.raw("no_rope_layers") != []:
        return tuple(map(bool, fields.integers("no_rope_layers", count)))
    period = fields.integer("no_rope_layer_interval", 4)
    return tuple((i + 1) % period != 0 for i in range(count))


def _chunks(fields: Fields, rotated: tuple[bool, ...]) -> tuple[int, ...]:
    """Chunk per layer: null means none; a missing field means 8192."""
    there = fields.has("attention_chunk_size") or not fields.mentions("attention_chunk_size")
    chunk = fields.integer("attention_chunk_size", 8192) if there else 0
    if not fields.has("layer_types"):
        return tuple(chunk if turns else 0 for turns in rotated)
    kinds = fields.texts("layer_types", len(rotated))
    if not set(kinds) <= {"chunked_attention", "full_attention"}:
        raise ModelError(f"{fields.origin}: a layer type is not one of chunked_attention, full_attention")
    return tuple(chunk if kind == "chunked_attention" else 0 for kind in kinds)


def _growth(fields: Fields) -> QueryGrowth | None:
    """attn_temperature_tuning is a flag; the first checkpoints have a number instead."""
    tuned = fields.raw("attn_temperature_tuning", True)
    growth = QueryGrowth(fields.number("floor_scale", 8192), fields.number("attn_scale", 0.1))
    return growth if tuned else None


def read_config(fields: Fields, generation: Fields) -> ModelConfig:
    """intermediate_size is an expert's; intermediate_size_mlp is that of layers without experts."""
    if fields.integer("num_experts_per_tok", 1) != 1:
        raise ModelError(
            f"{fields.origin}: a llama4 model with num_experts_per_tok {fields.integer('num_experts_per_tok')} is not "
            "supported; published ones have 1"
        )
    rotated, layers = _rotated(fields), layer_count(fields)
    step = fields.integer("interleave_moe_layer_step", 1)
    mixed = fields.integers("moe_layers") if fields.has("moe_layers") else tuple(range(step - 1, layers, step))
    experts = read_experts(
        fields.with_values(num_experts_per_tok=1),
        intermediate_size="intermediate_size",
        layers=tuple(i for i in range(layers) if i in mixed),
        # The weight of a single expert is 1: the router's score is applied to its input.
        scores="softmax",
        normalised=True,
        scaled_input=True,
        shared_size=fields.integer("intermediate_size"),
    )
    bias, positions = fields.flag("attention_bias", False), fields.integer("max_position_embeddings")
    return standard_config(
        fields.with_values(intermediate_size=fields.integer("intermediate_size_mlp", 16384)),
        generation,
        attention_bias=bias,
        o_bias=bias,
        qk_norm="unit" if fields.flag("use_qk_norm", True) else "none",
        head_dim=_HEAD_DIM,
        default_eps=1e-5,
        rope=read_rope(fields, positions, head_sizes(fields, _HEAD_DIM)[2], theta=_THETA),
        layer_chunks=_chunks(fields, rotated),
        unrotated_layers=tuple(i for i, turns in enumerate(rotated) if not turns),
        query_growth=_growth(fields),
        experts=experts if experts.layers else None,
    )


def read_config_with_images(fields: Fields, generation: Fields) -> ModelConfig:
    return replace(read_config(text_fields(fields), generation), model_type=fields.text("model_type"))


# Redundant with lists, or tool metadata.
_HARMLESS = frozenset({"no_rope_layer_interval", "interleave_moe_layer_step", "for_llm_compressor"})
_NEUTRAL = {"nope_layer_interval": 4}
_EXPERTS = f"{_BLOCK}.experts"
LLAMA4_TEXT = Family(
    "llama4_text",
    read_config,
    _LAYOUT.weight_map,
    other_maps=(apart(_LAYOUT, _EXPERTS).weight_map,),
    harmless=_HARMLESS,
    neutral=_NEUTRAL,
)
LLAMA4 = Family(
    "llama4",
    read_config_with_images,
    _WITH_IMAGES.weight_map,
    other_maps=(apart(_WITH_IMAGES, _EXPERTS).weight_map,),
    harmless=harmless_with_images(_HARMLESS),
    neutral=neutral_with_images(_NEUTRAL),
)
