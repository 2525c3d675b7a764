"""GPT-2 and GPTBigCode (StarCoder): position table, layer norms, no rotation."""

from __future__ import annotations

from dataclasses import replace

from llmc.models.config import ModelConfig
from llmc.models.errors import ModelError
from llmc.models.families.family import Family
from llmc.models.fields import Fields
from llmc.models.layout import Layout, without
from llmc.models.rotary import NO_ROPE
from llmc.models.row_orders import by_group
from llmc.models.standard import read_activation, standard_config
from llmc.models.weight_map import WeightMap

_LAYOUT = Layout(
    embed="transformer.wte",
    positions="transformer.wpe",
    layer="transformer.h.{}",
    attention_norm="ln_1",
    qkv=("attn.c_attn",),
    out="attn.c_proj",
    mlp_norm="ln_2",
    up="mlp.c_fc",
    down="mlp.c_proj",
    norm="transformer.ln_f",
    unused=("transformer.h.{}.attn.bias", "transformer.h.{}.attn.masked_bias"),
)


def _read(fields: Fields, generation: Fields, activation: str) -> ModelConfig:
    for name in ("scale_attn_by_inverse_layer_idx", "add_cross_attention"):
        if fields.flag(name, False):
            raise ModelError(f"{fields.origin}: {name} is not supported")
    fields = fields.renamed(
        hidden_size="n_embd",
        num_hidden_layers="n_layer",
        num_attention_heads="n_head",
        max_position_embeddings="n_positions",
        intermediate_size="n_inner",
    )
    scaled = fields.flag("scale_attn_weights", True)
    return standard_config(
        fields,
        generation,
        attention_bias=True,
        o_bias=True,
        mlp_bias=True,
        eps="layer_norm_epsilon",
        default_eps=1e-5,
        intermediate_size=4 * fields.integer("hidden_size"),
        activation=read_activation(fields, "activation_function", activation),
        tie_word_embeddings=True,
        rope=NO_ROPE,
        learned_positions=fields.integer("max_position_embeddings"),
        norm="layer",
        norm_bias=True,
        gated=False,
        attention_scale=None if scaled else 1.0,
    )


def read_config(fields: Fields, generation: Fields) -> ModelConfig:
    return _read(fields, generation, "gelu_new")


def read_bigcode_config(fields: Fields, generation: Fields) -> ModelConfig:
    """multi_query: all heads share one k and one v."""
    heads = 1 if fields.flag("multi_query", True) else fields.integer("n_head")
    return _read(fields.with_values(num_key_value_heads=heads), generation, "gelu_pytorch_tanh")


def bigcode_weight_map(config: ModelConfig) -> WeightMap:
    return (_LAYOUT if config.num_kv_heads == 1 else replace(_LAYOUT, qkv_rows=by_group)).weight_map(config)


# Precision of scores, and options of the authors' inference server.
_OF_BIGCODE = """
    attention_softmax_in_fp32 scale_attention_softmax_in_fp32 num_key_value_heads inference_runner max_batch_size
    pad_key_length pre_allocate_kv_cache validate_runner_input
    """
_GPT2 = replace(_LAYOUT, transposed=True)
# The first checkpoints contain only the decoder.
GPT2 = Family(
    "gpt2",
    read_config,
    _GPT2.weight_map,
    other_maps=(without(_GPT2, "transformer.").weight_map,),
    harmless=frozenset({"reorder_and_upcast_attn"}),
)
GPT_BIGCODE = Family("gpt_bigcode", read_bigcode_config, bigcode_weight_map, harmless=frozenset(_OF_BIGCODE.split()))
