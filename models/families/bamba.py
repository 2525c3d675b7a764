"""Bamba: Llama with Mamba-2 mixers in place of attention in most layers; half of each head is rotated."""

from __future__ import annotations

from llmc.models.config import ModelConfig
from llmc.models.errors import ModelError
from llmc.models.families.family import Family
from llmc.models.families.mamba import OF_MIXERS, read_mixers
from llmc.models.fields import Fields
from llmc.models.layout import Layout
from llmc.models.rope_fields import read_rope
from llmc.models.standard import head_sizes, layer_count, standard_config

_LAYOUT = Layout(
    mlp_norm="pre_ff_layernorm",
    gate_up=("feed_forward.gate_proj", "feed_forward.up_proj"),
    down="feed_forward.down_proj",
    norm="model.final_layernorm",
)


def read_config(fields: Fields, generation: Fields) -> ModelConfig:
    count, bias = layer_count(fields), fields.flag("attention_bias", False)
    attention = fields.integers("attn_layer_indices") if fields.has("attn_layer_indices") else ()
    if any(layer >= count for layer in attention):
        raise ModelError(
            f"{fields.origin}: attn_layer_indices has layer {max(attention)}, and the layers are 0 to {count - 1}"
        )
    mixers = tuple(layer for layer in range(count) if layer not in attention)
    heads = fields if fields.mentions("num_key_value_heads") else fields.with_values(num_key_value_heads=8)
    positions = fields.integer("max_position_embeddings")
    return standard_config(
        heads,
        generation,
        attention_bias=bias,
        o_bias=bias,
        mlp_bias=fields.flag("mlp_bias", False),
        # As in transformers, whatever the outer partial_rotary_factor says.
        rope=read_rope(fields.with_values(partial_rotary_factor=None), positions, head_sizes(heads)[2], partial=0.5),
        mamba=read_mixers(fields, mixers) if mixers else None,
    )


BAMBA = Family(
    "bamba",
    read_config,
    _LAYOUT.weight_map,
    # Of training, of generation, of kernels, and of positions, which have another key.
    harmless=OF_MIXERS | {"attn_rotary_emb", "num_logits_to_keep", "use_mamba_kernels", "z_loss_coefficient"},
)
