"""The tower of Idefics3 and SmolVLM: SigLIP with a learned table of places, then one linear over merged patches."""

from __future__ import annotations

from llmc.models.config import ModelConfig
from llmc.models.errors import ModelError
from llmc.models.families.towers import behind_model, tower_family, vision_fields
from llmc.models.fields import Fields
from llmc.models.layout import Layout
from llmc.models.pooled import Dense, Pooled
from llmc.models.rotary import NO_ROPE
from llmc.models.standard import read_activation, standard_config
from llmc.models.tower import Tower

_LAYOUT = Layout(
    embed="vision_model.embeddings.position_embedding",
    patches="vision_model.embeddings.patch_embedding",
    layer="vision_model.encoder.layers.{}",
    attention_norm="layer_norm1",
    out="self_attn.out_proj",
    mlp_norm="layer_norm2",
    up="mlp.fc1",
    down="mlp.fc2",
    norm="vision_model.post_layernorm",
    dense=("connector.modality_projection.proj",),
    unused=("vision_model.embeddings.position_ids",),
    other_modules=("text_model.", "lm_head."),
)
_USUAL = {
    "hidden_size": 1152, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 16,
    "num_channels": 3, "image_size": 224, "patch_size": 32, "layer_norm_eps": 1e-6,
}  # fmt: skip
"""Of transformers, so that published files omit it."""
SIGLIP_TOWER = tower_family("siglip_tower", (_LAYOUT, behind_model(_LAYOUT)), "use_base_siglip")


def read_siglip_tower(fields: Fields, text: ModelConfig) -> ModelConfig:
    """A row is `scale_factor` patches high and wide."""
    vision, merge = vision_fields(fields, _USUAL), fields.integer("scale_factor", 2)
    size, patch = vision.integer("image_size"), vision.integer("patch_size")
    side = size // patch
    if side == 0 or side % merge:
        raise ModelError(
            f"{vision.origin}: images of {size} pixels have {side} patches of {patch} pixels on a side, of which "
            f"{merge} at a time are merged; correct image_size or patch_size"
        )
    tower = Tower(vision.integer("num_channels"), patch, merge * merge, patch_bias=True, places=side * side)
    return standard_config(
        vision.with_values(
            model_type=SIGLIP_TOWER.model_type,
            vocab_size=tower.places,
            max_position_embeddings=tower.places,
            tie_word_embeddings=True,
        ),
        Fields({}, fields.origin),
        attention_bias=True,
        o_bias=True,
        mlp_bias=True,
        eps="layer_norm_eps",
        activation=read_activation(vision, default="gelu_pytorch_tanh"),
        rope=NO_ROPE,
        norm="layer",
        norm_bias=True,
        gated=False,
        bidirectional=True,
        states="taken",
        tower=tower,
        pooled=Pooled("merged", (Dense(text.hidden_size),)),
    )
