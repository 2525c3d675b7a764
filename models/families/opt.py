"""OPT: a position table that begins at the third row, layer norms, ReLU."""

from __future__ import annotations

from llmc.models.config import ModelConfig
from llmc.models.errors import ModelError
from llmc.models.families.family import Family
from llmc.models.fields import Fields
from llmc.models.layout import Layout, without
from llmc.models.rotary import NO_ROPE
from llmc.models.standard import read_activation, standard_config

_LAYOUT = Layout(
    embed="model.decoder.embed_tokens",
    positions="model.decoder.embed_positions",
    skipped_positions=2,
    layer="model.decoder.layers.{}",
    attention_norm="self_attn_layer_norm",
    out="self_attn.out_proj",
    mlp_norm="final_layer_norm",
    up="fc1",
    down="fc2",
    norm="model.decoder.final_layer_norm",
    unused=(),
)
_FFN_DIM = 3072
_EPS = 1e-5  # torch's layer norm; not stated in config.json


def read_config(fields: Fields, generation: Fields) -> ModelConfig:
    fields.has("intermediate_size")  # nobody reads it, whatever it is
    fields = fields.with_values(intermediate_size=fields.integer("ffn_dim", _FFN_DIM))
    width = fields.integer("word_embed_proj_dim", fields.integer("hidden_size"))
    if width != fields.integer("hidden_size") or not fields.flag("do_layer_norm_before", True):
        raise ModelError(
            f"{fields.origin}: an opt model with word_embed_proj_dim {width}, or whose norms follow its blocks, is "
            "not supported"
        )
    bias = fields.flag("enable_bias", True)
    affine = fields.flag("layer_norm_elementwise_affine", True)
    return standard_config(
        fields,
        generation,
        attention_bias=bias,
        o_bias=bias,
        mlp_bias=bias,
        eps="layer_norm_eps",
        default_eps=_EPS,
        activation=read_activation(fields, "activation_function", "relu"),
        tie_word_embeddings=True,
        rope=NO_ROPE,
        learned_positions=fields.integer("max_position_embeddings"),
        norm="layer",
        norm_weight=affine,
        norm_bias=affine,
        gated=False,
    )


# Some checkpoints contain only the decoder.
OPT = Family(
    "opt",
    read_config,
    _LAYOUT.weight_map,
    other_maps=(without(_LAYOUT, "model.").weight_map,),
    neutral={"_remove_final_layer_norm": False},
)
