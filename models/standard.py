"""The config.json fields that most families share, and a family's choices about them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypedDict, Unpack

from llmc.models.brief import brief
from llmc.models.config import (
    Activation,
    Alibi,
    Experts,
    Heads,
    Latent,
    ModelConfig,
    Norm,
    QkNorm,
    QueryGrowth,
    Residual,
    ResidualFactors,
    States,
    Streams,
    TokenInputs,
)
from llmc.models.delta_net import DeltaNet
from llmc.models.errors import ModelError
from llmc.models.fields import Fields
from llmc.models.mamba import Mamba2
from llmc.models.multipliers import Multipliers
from llmc.models.pooled import Pooled
from llmc.models.rope_fields import read_rope
from llmc.models.rotary import Rope
from llmc.models.short_conv import ShortConv
from llmc.models.tower import Tower

_DTYPES = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}
MAX_LAYERS = 4096
"""Limit for per-layer lists made before the checkpoint confirms the number of layers."""
ACTIVATIONS: Mapping[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
    "relu2": "relu2",
}
"""By transformers' names."""


class Choices(TypedDict, total=False):
    """Fields of ModelConfig that most config.json files do not name."""

    norm: Norm
    norm_weight: bool
    norm_bias: bool
    residual: Residual
    residual_factors: ResidualFactors | None
    attention_gate: bool
    parallel_norms: int
    gated: bool
    down_bias: bool
    qk_norm_rotated: bool
    layer_chunks: tuple[int, ...]
    sinks: bool
    query_growth: QueryGrowth | None
    local_rope: Rope | None
    unrotated_layers: tuple[int, ...]
    learned_positions: int
    alibi: Alibi | None
    head_bias: bool
    normed_head: bool
    attention_cap: float | None
    clip_qkv: float | None
    embedding_norm: bool
    embedding_multiplier: float
    residual_multiplier: float
    logit_multiplier: float
    logit_cap: float | None
    experts: Experts | None
    latent: Latent | None
    normed_values: bool
    kv_layers: tuple[int, ...]
    delta_net: DeltaNet | None
    short_conv: ShortConv | None
    mamba: Mamba2 | None
    multipliers: Multipliers | None
    mlp_only_layers: tuple[int, ...]
    mixer_only_layers: tuple[int, ...]
    full_heads: Heads | None
    layer_sizes: tuple[int, ...]
    token_inputs: TokenInputs | None
    scaled_layers: bool
    streams: Streams | None
    first_norm: bool
    final_norm: bool
    bidirectional: bool
    token_types: int
    states: States
    tower: Tower | None
    pooled: Pooled | None


def layer_count(fields: Fields) -> int:
    return fields.integer("num_hidden_layers", maximum=MAX_LAYERS)


def read_activation(fields: Fields, name: str = "hidden_act", default: str = "silu") -> Activation:
    """Raises ModelError for an activation that llmc does not know."""
    activation = fields.text(name, default)
    if activation not in ACTIVATIONS:
        known = ", ".join(ACTIVATIONS)
        raise ModelError(f"{fields.origin}: {name} {brief(activation)} is not supported; one of {known}")
    return ACTIVATIONS[activation]


def head_sizes(fields: Fields, head_dim: int | None = None) -> tuple[int, int, int]:
    """(query heads, KV heads, head_dim). head_dim: the family's default; None for hidden_size / heads."""
    hidden, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    kv_heads = fields.integer("num_key_value_heads", heads)
    if heads % kv_heads:
        raise ModelError(
            f"{fields.origin}: num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}"
        )
    if not fields.has("head_dim") and head_dim is None and hidden % heads:
        raise ModelError(f"{fields.origin}: hidden_size {hidden} is not a multiple of num_attention_heads {heads}")
    return heads, kv_heads, fields.integer("head_dim", head_dim or hidden // heads)


def standard_config(
    fields: Fields,
    generation: Fields,
    *,
    attention_bias: bool,
    o_bias: bool,
    mlp_bias: bool = False,
    qk_norm: QkNorm = "none",
    head_dim: int | None = None,
    layer_windows: tuple[int, ...] | None = None,
    eps: str = "rms_norm_eps",
    default_eps: float | None = None,
    activation: Activation | None = None,
    intermediate_size: int | None = None,
    tie_word_embeddings: bool = False,
    rope: Rope | None = None,
    attention_scale: float | None = None,
    **choices: Unpack[Choices],
) -> ModelConfig:
    """Reads the fields that all families share; keywords are a family's choices.

    head_dim: the family's default; None for hidden_size / num_heads. layer_windows: None for full attention. eps: name
    of the field. activation: None to read hidden_act. intermediate_size, tie_word_embeddings: defaults for config.json.
    rope: None to read the usual fields. attention_scale: None for 1 / √head_dim.
    """
    activation = read_activation(fields) if activation is None else activation
    heads, kv_heads, head_dim = head_sizes(fields, head_dim)
    num_layers = layer_count(fields)
    max_positions = fields.integer("max_position_embeddings")
    dtype = fields.text("dtype" if fields.has("dtype") else "torch_dtype", "float32").removeprefix("torch.")
    if dtype not in _DTYPES:
        raise ModelError(f"{fields.origin}: dtype {brief(dtype)} is not one of {', '.join(_DTYPES)}")
    windows = layer_windows or (0,) * num_layers
    vocab = fields.integer("vocab_size")
    eos, bos = special_tokens(fields, generation, vocab)
    inner: dict[str, Any] = {} if intermediate_size is None else {"default": intermediate_size}
    least: dict[str, Any] = {} if default_eps is None else {"default": default_eps}
    return ModelConfig(
        model_type=fields.text("model_type"),
        vocab_size=vocab,
        hidden_size=fields.integer("hidden_size"),
        intermediate_size=fields.integer("intermediate_size", **inner),
        num_layers=num_layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        norm_eps=fields.number(eps, **least),
        rope=rope or read_rope(fields, max_positions, head_dim),
        max_position_embeddings=max_positions,
        tie_word_embeddings=fields.flag("tie_word_embeddings", tie_word_embeddings),
        attention_bias=attention_bias,
        o_bias=o_bias,
        mlp_bias=mlp_bias,
        qk_norm=qk_norm,
        attention_scale=head_dim**-0.5 if attention_scale is None else attention_scale,
        sliding_window=max(windows) or None,
        layer_windows=windows,
        eos_token_ids=eos,
        bos_token_id=bos,
        dtype=_DTYPES[dtype],
        activation=activation,
        **choices,
    )


def special_tokens(fields: Fields, generation: Fields, vocab: int) -> tuple[tuple[int, ...], int | None]:
    """(ids that end a text, id that begins one). generation_config.json takes precedence: the authors generate with
    it."""

    def ids(name: Literal["eos_token_id", "bos_token_id"], most: int | None = None) -> tuple[int, ...]:
        of = generation if generation.has(name) else fields
        found = of.token_ids(name)[:most]
        for token in found:
            if token >= vocab:
                raise ModelError(
                    f"{of.origin}: {name} {token} is outside the vocabulary of {vocab} tokens; correct it, or download "
                    "the checkpoint again"
                )
        return found

    eos, bos = ids("eos_token_id"), ids("bos_token_id", most=1)
    return eos, bos[0] if bos else None
