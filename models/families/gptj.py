"""GPT-J and CodeGen: interleaved rotation; attention and MLP read one layer norm."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from llmc.models.config import ModelConfig
from llmc.models.families.family import Family
from llmc.models.fields import Fields
from llmc.models.layout import Layout
from llmc.models.rotary import Rope
from llmc.models.standard import head_sizes, read_activation, standard_config
from llmc.models.weight_map import Rows

_LAYOUT = Layout(
    embed="transformer.wte",
    layer="transformer.h.{}",
    attention_norm="ln_1",
    qkv=("attn.q_proj", "attn.k_proj", "attn.v_proj"),
    interleaved=True,
    out="attn.out_proj",
    up="mlp.fc_in",
    down="mlp.fc_out",
    norm="transformer.ln_f",
    unused=("transformer.h.{}.attn.bias", "transformer.h.{}.attn.masked_bias", "transformer.h.{}.attn.causal_mask"),
)
_SHARDS = 4  # training shards of CodeGen, each with q, v and k of its heads


def _of_shards(config: ModelConfig) -> Rows:
    shards = np.arange(sum(config.qkv_parts(0)), dtype=np.int32).reshape(_SHARDS, 3, -1)
    return np.concatenate([shards[:, part].ravel() for part in (0, 2, 1)])


def read_config(fields: Fields, generation: Fields) -> ModelConfig:
    fields = fields.renamed(
        hidden_size="n_embd",
        num_hidden_layers="n_layer",
        num_attention_heads="n_head",
        max_position_embeddings="n_positions",
        intermediate_size="n_inner",
    )
    head_dim = head_sizes(fields)[2]
    return standard_config(
        fields,
        generation,
        attention_bias=False,
        o_bias=False,
        mlp_bias=True,
        eps="layer_norm_epsilon",
        intermediate_size=4 * fields.integer("hidden_size"),
        activation=read_activation(fields, "activation_function", "gelu_new"),
        rope=Rope(10000.0, fields.integer("rotary_dim", min(64, head_dim), maximum=head_dim)),
        norm="layer",
        norm_bias=True,
        gated=False,
        residual="parallel",
        head_bias=True,
    )


_NEUTRAL = {"rotary": True, "scale_attn_weights": True}
GPTJ = Family("gptj", read_config, _LAYOUT.weight_map, neutral=_NEUTRAL)
CODEGEN = Family(
    "codegen",
    read_config,
    replace(_LAYOUT, qkv=("attn.qkv_proj",), qkv_rows=_of_shards).weight_map,
    neutral=_NEUTRAL,
)
