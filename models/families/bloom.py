"""BLOOM: ALiBi, a layer norm on the embedding, q, k and v interleaved by head."""

from __future__ import annotations

from llmc.models.alibi import paper_slopes
from llmc.models.config import Alibi, ModelConfig
from llmc.models.errors import ModelError
from llmc.models.families.family import Family
from llmc.models.fields import Fields
from llmc.models.layout import Layout, without
from llmc.models.rotary import NO_ROPE
from llmc.models.row_orders import by_group
from llmc.models.standard import standard_config

_LAYOUT = Layout(
    embed="transformer.word_embeddings",
    embed_norm="transformer.word_embeddings_layernorm",
    layer="transformer.h.{}",
    qkv=("self_attention.query_key_value",),
    qkv_rows=by_group,
    out="self_attention.dense",
    up="mlp.dense_h_to_4h",
    down="mlp.dense_4h_to_h",
    norm="transformer.ln_f",
    unused=(),
)
_LENGTH = 2048  # training length of all sizes; the seq_length of most


def read_config(fields: Fields, generation: Fields) -> ModelConfig:
    """n_embed is an older name of hidden_size. slow_but_exact does not change the sums mathematically."""
    fields = fields.renamed(num_hidden_layers="n_layer", num_attention_heads="n_head", hidden_size="n_embed")
    if fields.flag("apply_residual_connection_post_layernorm", False):
        raise ModelError(f"{fields.origin}: apply_residual_connection_post_layernorm is not supported")
    length = fields.integer("seq_length", _LENGTH)
    return standard_config(
        fields.with_values(max_position_embeddings=fields.integer("max_position_embeddings", length)),
        generation,
        attention_bias=True,
        o_bias=True,
        mlp_bias=True,
        eps="layer_norm_epsilon",
        default_eps=1e-5,
        activation="gelu_tanh",
        intermediate_size=4 * fields.integer("hidden_size"),
        tie_word_embeddings=True,
        rope=NO_ROPE,
        alibi=Alibi(paper_slopes(fields.integer("num_attention_heads"))),
        embedding_norm=True,
        norm="layer",
        norm_bias=True,
        gated=False,
    )


# Precision of softmax and sums; the latter split into pretraining_tp parts. The rest is of the training code.
_HARMLESS = """
    attention_softmax_in_fp32 bias_dropout_fusion masked_softmax_fusion offset_alibi skip_bias_add skip_bias_add_qkv
    slow_but_exact
    """
# Most checkpoints contain only the decoder.
BLOOM = Family(
    "bloom",
    read_config,
    _LAYOUT.weight_map,
    other_maps=(without(_LAYOUT, "transformer.").weight_map,),
    harmless=frozenset(_HARMLESS.split()),
)
