"""TeleChat and TeleChat2: k and v interleaved by head; biases on each block's last matrix."""

from __future__ import annotations

import numpy as np

from llmc.models.config import ModelConfig
from llmc.models.errors import ModelError
from llmc.models.families.family import Family
from llmc.models.fields import Fields
from llmc.models.layout import Layout, without
from llmc.models.rotary import Rope, RopeScaling
from llmc.models.row_orders import heads_to_rows
from llmc.models.standard import head_sizes, standard_config
from llmc.models.weight_map import Rows


def _kv_by_head(config: ModelConfig) -> Rows:
    of_kv = config.num_heads + np.arange(2 * config.num_kv_heads).reshape(-1, 2).T.ravel()
    return heads_to_rows(np.concatenate((np.arange(config.num_heads), of_kv)), config.head_dim)


_LAYOUT = Layout(
    embed="transformer.word_embeddings",
    layer="transformer.h.{}",
    qkv=("self_attention.query", "self_attention.key_value"),
    qkv_rows=_kv_by_head,
    out="self_attention.dense",
    norm="transformer.ln_f",
    unused=("transformer.h.{}.self_attention.rotary_emb.inv_freq",),
)


# The text length up to which the first model's code leaves frequencies alone, and later code.
_FIRST_BASE, _LATER_BASE = 4096, 8192


def read_config(fields: Fields, generation: Fields) -> ModelConfig:
    """Frequencies are those of the longest text, at least of training; beyond it cosines grow too.

    Of published models, only TeleChat-7B, the first, ties the embedding, and does not say so.
    """
    fields = fields.renamed(
        num_hidden_layers="n_layer", num_attention_heads="n_head", intermediate_size="ffn_hidden_size"
    )
    for name in ("apply_residual_connection_post_layernorm", "embed_layernorm"):
        if fields.flag(name, False):
            raise ModelError(f"{fields.origin}: {name} of a telechat model is not supported")
    is_first = not fields.mentions("tie_word_embeddings")
    trained = fields.integer("training_seqlen", 8192)
    base = fields.integer("base_seqlen", _FIRST_BASE if is_first else _LATER_BASE)
    fields = fields.with_values(max_position_embeddings=trained)
    stretched = RopeScaling("ntk_steps", trained / base, base, mscale=1.0)
    return standard_config(
        fields,
        generation,
        attention_bias=False,
        o_bias=True,
        eps="layer_norm_epsilon",
        default_eps=1e-5,
        activation="silu",
        rope=Rope(fields.number("rope_theta", 10000.0), head_sizes(fields)[2], stretched),
        tie_word_embeddings=is_first,
        down_bias=True,
    )


# How it was run, the maximum text length, and what the authors' code does not read.
_HARMLESS = """
    attention_softmax_in_fp32 bias_dropout_fusion flash_attn logn masked_softmax_fusion max_position_embeddings
    offset_alibi semi_causal seq_length skip_bias_add skip_bias_add_qkv slow_but_exact
    """
TELECHAT = Family(
    "telechat",
    read_config,
    _LAYOUT.weight_map,
    # TeleChat-7B's files have the decoder alone.
    other_maps=(without(_LAYOUT, "transformer.").weight_map,),
    harmless=frozenset(_HARMLESS.split()),
)
