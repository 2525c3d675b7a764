"""MPT: ALiBi, layer norms and matrices without biases, clipped q, k and v."""

from __future__ import annotations

from llmc.models.alibi import mpt_slopes
from llmc.models.config import Alibi, ModelConfig
from llmc.models.errors import ModelError
from llmc.models.families.family import Family
from llmc.models.fields import Fields
from llmc.models.known_keys import HARMLESS, nested
from llmc.models.layout import Layout
from llmc.models.rotary import NO_ROPE
from llmc.models.standard import standard_config

_LAYOUT = Layout(
    embed="transformer.wte",
    layer="transformer.blocks.{}",
    attention_norm="norm_1",
    qkv=("attn.Wqkv",),
    out="attn.out_proj",
    mlp_norm="norm_2",
    up="ffn.up_proj",
    down="ffn.down_proj",
    norm="transformer.norm_f",
    unused=(),
)


def read_config(fields: Fields, generation: Fields) -> ModelConfig:
    """alibi_bias_max applies, as in the authors' code; transformers always uses 8."""
    fields = fields.renamed(
        hidden_size="d_model",
        num_attention_heads="n_heads",
        num_hidden_layers="n_layers",
        max_position_embeddings="max_seq_len",
    )
    attention = fields.table("attn_config") or Fields({}, f"{fields.origin}: attn_config")
    kind = attention.text("attn_type", "multihead_attention")
    if kind != "multihead_attention" or not attention.flag("alibi", True) or not fields.flag("no_bias", True):
        raise ModelError(f"{fields.origin}: mpt without ALiBi, with biases or attn_type {kind} is not supported")
    for origin, name in ((attention, "qk_ln"), (attention, "prefix_lm"), (fields, "logit_scale")):
        if origin.has(name) and origin.raw(name) is not False:
            raise ModelError(f"{origin.origin}: {name} is not supported")
    heads, hidden = fields.integer("num_attention_heads"), fields.integer("hidden_size")
    return standard_config(
        fields,
        generation,
        attention_bias=False,
        o_bias=False,
        eps="layer_norm_epsilon",
        default_eps=1e-5,
        activation="gelu",
        intermediate_size=fields.integer("expansion_ratio", 4) * hidden,
        tie_word_embeddings=True,
        rope=NO_ROPE,
        alibi=Alibi(mpt_slopes(heads, attention.number("alibi_bias_max", 8.0))),
        attention_scale=attention.number("softmax_scale") if attention.has("softmax_scale") else None,
        clip_qkv=attention.number("clip_qkv") if attention.has("clip_qkv") else None,
        norm="layer",
        gated=False,
    )


# Options of training and of the code that ran it; beside ALiBi there is no position table. The attention table also has
# the keys of every transformers table.
_HARMLESS = """
    emb_pdrop embedding_fraction init_config init_device learned_pos_emb tokenizer_name verbose attn_config.attn_impl
    attn_config.model_type
    """
MPT = Family(
    "mpt",
    read_config,
    _LAYOUT.weight_map,
    harmless=frozenset(_HARMLESS.split()) | nested("attn_config", HARMLESS),
    neutral={
        "norm_type": "low_precision_layernorm",
        "attn_config.attn_uses_sequence_id": False,
        "attn_config.is_encoder_decoder": False,
    },
)
