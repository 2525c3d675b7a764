"""ChatGLM2 and 3, CodeGeeX2 and 4, and GLM-4 9B as first published: half of each head rotated, in neighbours."""

from __future__ import annotations

from dataclasses import replace

from llmc.models.config import ModelConfig
from llmc.models.errors import ModelError
from llmc.models.families.family import Family
from llmc.models.fields import Fields
from llmc.models.layout import Layout
from llmc.models.rope_fields import read_rope
from llmc.models.row_orders import by_group
from llmc.models.standard import head_sizes, standard_config
from llmc.models.weight_map import WeightMap

_LAYOUT = Layout(
    embed="transformer.embedding.word_embeddings",
    layer="transformer.encoder.layers.{}",
    qkv=("self_attention.query_key_value",),
    out="self_attention.dense",
    gate_up=("mlp.dense_h_to_4h",),
    down="mlp.dense_4h_to_h",
    norm="transformer.encoder.final_layernorm",
    head="transformer.output_layer",
    interleaved=True,
    unused=("transformer.rotary_pos_emb.inv_freq",),
)
_POSITIONS = 8192  # original context that ChatGLM2-6B-32K stretches


def _check(fields: Fields) -> None:
    if fields.has("position_encoding_2d") or not fields.has("ffn_hidden_size"):
        raise ModelError(f"{fields.origin}: ChatGLM-6B, the first one, is not supported; ChatGLM2 and later ones are")
    for name, only in (
        ("rmsnorm", True),
        ("post_layer_norm", True),
        ("apply_residual_connection_post_layernorm", False),
    ):
        if fields.flag(name, only) is not only:
            raise ModelError(f"{fields.origin}: a chatglm model with {name} {not only} is not supported")


def read_config(fields: Fields, generation: Fields) -> ModelConfig:
    """rope_ratio scales the rotary base. ChatGLM2-6B-32K is refused: there it divides positions."""
    _check(fields)
    fields = fields.renamed(
        num_hidden_layers="num_layers",
        head_dim="kv_channels",
        intermediate_size="ffn_hidden_size",
        max_position_embeddings="seq_length",
    )
    heads, length = fields.integer("num_attention_heads"), fields.integer("max_position_embeddings")
    kv_heads = fields.integer("multi_query_group_num", 1) if fields.flag("multi_query_attention", False) else heads
    if kv_heads == heads and fields.flag("multi_query_attention", False):
        raise ModelError(f"{fields.origin}: multi_query_group_num {heads}, one a head, is not supported")
    ratio = fields.number("rope_ratio", 1.0)
    if ratio > 1.0 and ratio * _POSITIONS == length:
        raise ModelError(f"{fields.origin}: a rope_ratio {ratio:g} that divides positions is not supported")
    fields = fields.with_values(
        num_key_value_heads=kv_heads, rope_theta=10000.0 * ratio, vocab_size=fields.integer("padded_vocab_size")
    )
    bias, of_qkv = fields.flag("add_bias_linear", False), fields.flag("add_qkv_bias", False)
    return standard_config(
        fields,
        generation,
        attention_bias=bias or of_qkv,
        o_bias=bias,
        mlp_bias=bias,
        eps="layernorm_epsilon",
        default_eps=1e-5,
        activation="silu",
        rope=read_rope(fields, length, head_sizes(fields)[2], partial=0.5),
    )


def weight_map(config: ModelConfig) -> WeightMap:
    """Without groups, q, k and v are interleaved by head."""
    if config.num_kv_heads == config.num_heads:
        return replace(_LAYOUT, qkv_rows=by_group).weight_map(config)
    return _LAYOUT.weight_map(config)


# Precision of scores (scaled and rescaled), and training options; the groups are read where needed. padded_vocab_size
# is the actual vocabulary.
_HARMLESS = """
    apply_query_key_layer_scaling attention_softmax_in_fp32 bias_dropout_fusion fp32_residual_connection
    multi_query_group_num num_hidden_layers num_layers original_rope prefix_projection vocab_size
    """
CHATGLM = Family(
    "chatglm",
    read_config,
    weight_map,
    harmless=frozenset(_HARMLESS.split()),
    neutral={"pre_seq_len": 0, "quantization_bit": 0, "interleaved_qkv": False, "rotary_percent": 0.5},
)
