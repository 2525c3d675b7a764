"""The tower of Mistral 3: Pixtral, rotated in two dimensions, then a norm and three linears, the first over merged
patches."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from llmc.models.brief import brief
from llmc.models.config import ModelConfig
from llmc.models.errors import ModelError
from llmc.models.families.towers import behind_model, tower_family, vision_fields
from llmc.models.fields import Fields
from llmc.models.layout import Layout
from llmc.models.pooled import Dense, Pooled
from llmc.models.rotary import NO_ROPE
from llmc.models.standard import head_sizes, read_activation, standard_config
from llmc.models.tower import Tower
from llmc.models.weight_map import Target, WeightMap

_LAYOUT = Layout(
    embed_norm="vision_tower.ln_pre",
    patches="vision_tower.patch_conv",
    layer="vision_tower.transformer.layers.{}",
    attention_norm="attention_norm",
    qkv=("attention.q_proj", "attention.k_proj", "attention.v_proj"),
    out="attention.o_proj",
    mlp_norm="ffn_norm",
    gate_up=("feed_forward.gate_proj", "feed_forward.up_proj"),
    down="feed_forward.down_proj",
    norm="multi_modal_projector.norm",
    dense=(
        "multi_modal_projector.patch_merger.merging_layer",
        "multi_modal_projector.linear_1",
        "multi_modal_projector.linear_2",
    ),
    unused=(),
    other_modules=("language_model.", "lm_head."),
)
_MERGING = "pooled.dense.0.linear.weight"
_EPS = 1e-5
"""Of the tower's norms, in transformers' code."""
_LAST = -1
_USUAL = {
    "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16,
    "num_channels": 3, "image_size": 1540, "patch_size": 14, "hidden_act": "gelu",
}  # fmt: skip
"""Of transformers, so that published files omit it."""


def _patch_by_patch(config: ModelConfig, found: WeightMap) -> WeightMap:
    """The map with the merging matrix's columns in the order of merged rows, patch by patch; checkpoints have those of
    all patches for each channel."""
    assert config.tower is not None
    merged, size = config.tower.merged, config.hidden_size

    def in_order(rows: NDArray[np.float32]) -> NDArray[np.float32]:
        return rows.reshape(-1, size, merged).swapaxes(1, 2).reshape(len(rows), -1)

    def of(target: Target) -> Target:
        return replace(target, of_rows=in_order) if target.name == _MERGING else target

    return replace(found, targets=tuple(map(of, found.targets)))


PIXTRAL_TOWER = tower_family(
    "pixtral_tower", (behind_model(_LAYOUT), _LAYOUT), "rope_theta rope_parameters", _patch_by_patch
)


def read_pixtral_tower(fields: Fields, text: ModelConfig) -> ModelConfig:
    """A row is `spatial_merge_size` patches high and wide. The angles of the rotation come with the patches."""
    vision, merge = vision_fields(fields, _USUAL, rms_norm_eps=_EPS), fields.integer("spatial_merge_size", 2)
    layer, act = fields.raw("vision_feature_layer", _LAST), fields.text("projector_hidden_act", "gelu")
    if layer != _LAST or isinstance(layer, bool):
        raise ModelError(
            f"{fields.origin}: vision_feature_layer {brief(layer)} is not supported; {_LAST}, the last layer, is"
        )
    if act != "gelu":
        raise ModelError(f"{fields.origin}: projector_hidden_act {brief(act)} is not supported; gelu is")
    _, _, head_dim = head_sizes(vision)
    size, bias = vision.integer("hidden_size"), fields.flag("multimodal_projector_bias", False)
    side = vision.integer("image_size") // vision.integer("patch_size")
    dense = (Dense(size), Dense(text.hidden_size, bias, "gelu"), Dense(text.hidden_size, bias))
    return standard_config(
        vision.with_values(
            model_type=PIXTRAL_TOWER.model_type,
            vocab_size=1,
            max_position_embeddings=max(1, side * side),
            tie_word_embeddings=True,
        ),
        Fields({}, fields.origin),
        attention_bias=False,
        o_bias=False,
        activation=read_activation(vision),
        rope=NO_ROPE,
        embedding_norm=True,
        bidirectional=True,
        states="taken",
        tower=Tower(vision.integer("num_channels"), vision.integer("patch_size"), merge * merge, rotation=head_dim),
        pooled=Pooled("merged", dense, norm_eps=text.norm_eps),
    )
