"""Falcon: rotary positions or ALiBi, q, k and v fused by group, mostly parallel blocks, a tied head."""

from __future__ import annotations

from dataclasses import replace

from llmc.models.alibi import paper_slopes
from llmc.models.config import Alibi, ModelConfig
from llmc.models.families.family import Family
from llmc.models.fields import Fields
from llmc.models.layout import Layout
from llmc.models.rotary import NO_ROPE
from llmc.models.row_orders import by_group
from llmc.models.standard import read_activation, standard_config
from llmc.models.weight_map import WeightMap

_LAYOUT = Layout(
    embed="transformer.word_embeddings",
    layer="transformer.h.{}",
    qkv=("self_attention.query_key_value",),
    qkv_rows=by_group,
    out="self_attention.dense",
    up="mlp.dense_h_to_4h",
    down="mlp.dense_4h_to_h",
    norm="transformer.ln_f",
    unused=("transformer.h.{}.self_attention.rotary_emb.inv_freq",),
)


def read_config(fields: Fields, generation: Fields) -> ModelConfig:
    """num_ln_in_parallel_attn: by default 2 in the new decoder architecture, otherwise 1."""
    fields = fields.renamed(num_hidden_layers="n_layer", num_attention_heads="n_head", num_kv_heads="n_head_kv")
    alibi = fields.flag("alibi", False)
    for name in ("rope_parameters", "rope_scaling", "rope_theta") if alibi else ():
        fields.raw(name, None)  # no rotation
    new, bias = fields.flag("new_decoder_architecture", False), fields.flag("bias", False)
    heads = fields.integer("num_attention_heads")
    if new:
        kv_heads = fields.integer("num_kv_heads", heads)
    else:
        kv_heads = 1 if fields.flag("multi_query", True) else heads
    parallel = new or fields.flag("parallel_attn", True)
    return standard_config(
        fields.with_values(
            num_key_value_heads=kv_heads, max_position_embeddings=fields.integer("max_position_embeddings", 2048)
        ),
        generation,
        attention_bias=bias,
        o_bias=bias,
        mlp_bias=bias,
        eps="layer_norm_epsilon",
        default_eps=1e-5,
        activation=read_activation(fields, "activation", "gelu"),
        intermediate_size=fields.integer("ffn_hidden_size", 4 * fields.integer("hidden_size")),
        tie_word_embeddings=True,
        norm="layer",
        norm_bias=True,
        gated=False,
        residual="parallel" if parallel else "pre",
        parallel_norms=fields.integer("num_ln_in_parallel_attn", 2, maximum=2) if new else 1,
        rope=NO_ROPE if alibi else None,
        alibi=Alibi(paper_slopes(heads), rounded=True) if alibi else None,
    )


def weight_map(config: ModelConfig) -> WeightMap:
    if config.parallel_norms == 2:
        return replace(_LAYOUT, attention_norm="ln_attn", mlp_norm="ln_mlp").weight_map(config)
    return _LAYOUT.weight_map(config)


# The keys on heads are read where they matter; the rest belong to older and newer variants.
FALCON = Family(
    "falcon",
    read_config,
    weight_map,
    harmless=frozenset({"multi_query", "num_kv_heads", "n_head_kv"}),
    neutral={"parallel_attn": True, "apply_residual_connection_post_layernorm": False},
)
