"""EXAONE 3 and 3.5, EXAONE Deep: Llama with other names."""

from __future__ import annotations

from llmc.models.config import ModelConfig
from llmc.models.families.family import Family
from llmc.models.fields import Fields
from llmc.models.layout import LLAMA_LAYOUT, Layout
from llmc.models.rope_fields import read_rope
from llmc.models.standard import head_sizes, read_activation, standard_config

_LAYOUT = Layout(
    embed="transformer.wte",
    layer="transformer.h.{}",
    attention_norm="ln_1",
    qkv=("attn.attention.q_proj", "attn.attention.k_proj", "attn.attention.v_proj"),
    out="attn.attention.out_proj",
    mlp_norm="ln_2",
    gate_up=("mlp.c_fc_0", "mlp.c_fc_1"),
    down="mlp.c_proj",
    norm="transformer.ln_f",
    unused=("transformer.rotary.inv_freq", "transformer.h.{}.attn.attention.rotary.inv_freq"),
)


def read_config(fields: Fields, generation: Fields) -> ModelConfig:
    fields = fields.renamed(
        num_hidden_layers="num_layers", rms_norm_eps="layer_norm_epsilon", hidden_act="activation_function"
    )
    bias = fields.flag("attention_bias", False)
    return standard_config(
        fields,
        generation,
        attention_bias=bias,
        o_bias=bias,
        mlp_bias=fields.flag("mlp_bias", False),
        default_eps=1e-5,
        activation=read_activation(fields),
        rope=read_rope(fields, fields.integer("max_position_embeddings"), head_sizes(fields)[2], theta=500000.0),
    )


EXAONE = Family(
    "exaone",
    read_config,
    _LAYOUT.weight_map,
    other_maps=(LLAMA_LAYOUT.weight_map,),
    harmless=frozenset({"embed_dropout"}),
)
