"""Qwen, first generation: q, k and v in one matrix with biases; up before gate."""

from __future__ import annotations

from llmc.models.config import ModelConfig, QueryGrowth
from llmc.models.errors import ModelError
from llmc.models.families.family import Family
from llmc.models.fields import Fields
from llmc.models.layout import Layout
from llmc.models.rotary import Rope, RopeScaling
from llmc.models.standard import head_sizes, standard_config

_LAYOUT = Layout(
    embed="transformer.wte",
    layer="transformer.h.{}",
    attention_norm="ln_1",
    qkv=("attn.c_attn",),
    out="attn.c_proj",
    mlp_norm="ln_2",
    gate_up=("mlp.w2", "mlp.w1"),
    down="mlp.c_proj",
    norm="transformer.ln_f",
    unused=("transformer.rotary_emb.inv_freq", "transformer.h.{}.attn.rotary_emb.inv_freq"),
)


def read_config(fields: Fields, generation: Fields) -> ModelConfig:
    """intermediate_size is that of gate and up together. Beyond the training length seq_length, frequencies are those
    of the longest text, and queries grow with position."""
    if (inner := fields.integer("intermediate_size")) % 2:
        raise ModelError(f"{fields.origin}: intermediate_size {inner} is odd, but it counts gate and up")
    length = fields.integer("seq_length", fields.integer("max_position_embeddings", 8192))
    fields = fields.renamed(head_dim="kv_channels", rope_theta="rotary_emb_base").with_values(
        intermediate_size=inner // 2, max_position_embeddings=length
    )
    no_bias, head_dim = fields.flag("no_bias", True), head_sizes(fields)[2]
    stretched = RopeScaling("ntk_steps", 1.0, length) if fields.flag("use_dynamic_ntk", True) else None
    grows = fields.flag("use_logn_attn", True) and length > 1
    return standard_config(
        fields,
        generation,
        attention_bias=True,
        o_bias=not no_bias,
        mlp_bias=not no_bias,
        eps="layer_norm_epsilon",
        default_eps=1e-6,
        activation="silu",
        rope=Rope(fields.number("rope_theta", 10000.0), head_dim, stretched),
        query_growth=QueryGrowth(length, 1.0, "log") if grows else None,
    )


# Options of training and of the code that ran it.
_HARMLESS = """
    attn_dropout_prob emb_dropout_prob bf16 fp16 fp32 onnx_safe softmax_in_fp32 use_cache_kernel use_cache_quantization
    max_position_embeddings
    """
QWEN = Family(
    "qwen",
    read_config,
    _LAYOUT.weight_map,
    harmless=frozenset(_HARMLESS.split()),
    neutral={"rotary_pct": 1.0, "scale_attn_weights": True, "pos_emb": "rotary"},
)
