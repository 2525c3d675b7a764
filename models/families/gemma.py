"""Gemma: norm weights less one, a scaled embedding, GELU. Gemma 3: norms around both blocks, two rotary bases."""

from __future__ import annotations

from typing import Any

from llmc.models.config import ModelConfig, Rope
from llmc.models.errors import ModelError
from llmc.models.families.family import Family
from llmc.models.fields import Fields
from llmc.models.layout import Layout
from llmc.models.rope_fields import read_rope, rope_of, rope_table
from llmc.models.standard import layer_count, read_activation, standard_config, windows_by_type

_LAYOUT = Layout(norm_plus=1.0)
_LAYOUT_3 = Layout(norm_plus=1.0, mlp_norm="pre_feedforward_layernorm")
_PERIOD = 6  # of layers, the last of which has no window
_LOCAL_THETA = 10000.0


def _read(fields: Fields, generation: Fields, **more: Any) -> ModelConfig:
    bias = fields.flag("attention_bias", False)
    if fields.flag("use_bidirectional_attention", False):
        raise ModelError(f"{fields.origin}: use_bidirectional_attention is not supported")
    # hidden_act of the first checkpoints says gelu and means gelu_pytorch_tanh; hidden_activation came to say so.
    name = "hidden_activation" if fields.has("hidden_activation") else "hidden_act"
    activation = read_activation(fields, name, "gelu_pytorch_tanh")
    activation = "gelu_tanh" if activation == "gelu" else activation
    return standard_config(
        fields,
        generation,
        attention_bias=bias,
        o_bias=bias,
        activation=activation,
        tie_word_embeddings=True,
        head_dim=256,
        embedding_multiplier=fields.integer("hidden_size") ** 0.5,
        **more,
    )


def read_config(fields: Fields, generation: Fields) -> ModelConfig:
    return _read(fields, generation)


def _ropes(fields: Fields) -> tuple[Rope, Rope]:
    """(of layers without a window, of layers with one)."""
    positions, head_dim = fields.integer("max_position_embeddings"), fields.integer("head_dim", 256)
    table = rope_table(fields)
    whole, local = table.table("full_attention"), table.table("sliding_attention")
    if whole is not None and local is not None:
        return rope_of(fields, whole, positions, head_dim), rope_of(fields, local, positions, head_dim)
    theta = fields.number("rope_local_base_freq", _LOCAL_THETA)
    return read_rope(fields, positions, head_dim, theta=1e6), Rope(theta, head_dim)


def read_config_3(fields: Fields, generation: Fields) -> ModelConfig:
    if fields.has("attn_logit_softcapping"):
        raise ModelError(f"{fields.origin}: attn_logit_softcapping is not supported")
    window = fields.integer("sliding_window", 4096)
    if fields.has("layer_types"):
        windows = windows_by_type(fields, window)
    else:
        period = fields.integer("sliding_window_pattern", _PERIOD)
        windows = tuple(window if (i + 1) % period else 0 for i in range(layer_count(fields)))
    rope, local = _ropes(fields)
    return _read(
        fields,
        generation,
        qk_norm="head",
        layer_windows=windows,
        residual="sandwich",
        rope=rope,
        local_rope=local,
        attention_scale=fields.number("query_pre_attn_scalar", 256.0) ** -0.5,
        logit_cap=fields.number("final_logit_softcapping") if fields.has("final_logit_softcapping") else None,
    )


# hidden_act is read where there is no hidden_activation, the pattern where there are no layer types.
GEMMA = Family("gemma", read_config, _LAYOUT.weight_map, harmless=frozenset({"hidden_act"}))
GEMMA3_TEXT = Family(
    "gemma3_text",
    read_config_3,
    _LAYOUT_3.weight_map,
    harmless=frozenset({"hidden_act", "sliding_window_pattern", "_sliding_window_pattern"}),
)
