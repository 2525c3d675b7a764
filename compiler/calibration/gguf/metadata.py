"""A model's configuration as GGUF metadata, with the keys of llama.cpp's converter."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmc.compiler.config import CompileError
from llmc.models.config import ModelConfig
from llmc.models.rope import checked_frequencies
from llmc.models.rotary import RopeScaling
from llmc.models.sources.gguf.architecture import Architecture
from llmc.models.sources.gguf.architectures import ARCHITECTURES
from llmc.models.sources.gguf.written import WRITTEN

_ROPE_SCALINGS = ("linear", "yarn", "llama3")


def architecture_of(model: ModelConfig) -> Architecture:
    """The model's architecture in GGUF. Raises CompileError if this writer cannot express the whole model."""
    written = WRITTEN.get(model.model_type)
    if written is None:
        raise CompileError(
            f"--format gguf does not know models of type {model.model_type}; use --format compressed-tensors"
        )
    windows = set(model.layer_windows)
    if windows not in (set(), {0}) and (not written.windows or len(windows) > 1):
        raise CompileError(
            f"--format gguf has no place for the sliding windows of this {model.model_type} model; "
            "use --format compressed-tensors"
        )
    scaling = model.rope.scaling
    if scaling is not None and (scaling.rope_type not in _ROPE_SCALINGS or scaling.mscale is not None):
        raise CompileError(
            f"--format gguf has no place for rope scaling {scaling.rope_type} as this model has it; "
            "use --format compressed-tensors"
        )
    return ARCHITECTURES[written.architecture]


def add_config(writer: Any, model: ModelConfig) -> None:
    """Adds the configuration to a GGUFWriter of the model's architecture."""
    writer.add_context_length(model.max_position_embeddings)
    writer.add_embedding_length(model.hidden_size)
    writer.add_block_count(model.num_layers)
    writer.add_feed_forward_length(model.intermediate_size)
    writer.add_head_count(model.num_heads)
    writer.add_head_count_kv(model.num_kv_heads)
    writer.add_key_length(model.head_dim)
    writer.add_value_length(model.head_dim)
    writer.add_rope_dimension_count(model.rope.dim)
    writer.add_rope_freq_base(model.rope.theta)
    writer.add_layer_norm_rms_eps(model.norm_eps)
    writer.add_vocab_size(model.vocab_size)
    if model.sliding_window is not None:
        writer.add_sliding_window(model.sliding_window)
    if model.rope.scaling is not None:
        _add_scaling(writer, model.rope.scaling)


def _add_scaling(writer: Any, scaling: RopeScaling) -> None:
    from gguf import RopeScalingType

    if scaling.rope_type == "llama3":
        return  # a tensor, not metadata
    writer.add_rope_scaling_type(RopeScalingType(scaling.rope_type))
    writer.add_rope_scaling_factor(scaling.factor)
    if scaling.rope_type != "yarn":
        return
    writer.add_rope_scaling_orig_ctx_len(scaling.original_max_position_embeddings)
    if scaling.beta_fast is not None:
        writer.add_rope_scaling_yarn_beta_fast(scaling.beta_fast)
    if scaling.beta_slow is not None:
        writer.add_rope_scaling_yarn_beta_slow(scaling.beta_slow)
    if scaling.attention_factor is not None:
        plain = 1.0 + 0.1 * math.log(max(scaling.factor, 1.0))
        writer.add_rope_scaling_attn_factors(scaling.attention_factor / plain)


def rope_factors(model: ModelConfig) -> NDArray[np.float32] | None:
    """Divisors of the rotary frequencies for Llama 3 scaling; None without it."""
    scaling = model.rope.scaling
    theta, dim = model.rope.theta, model.rope.dim
    if theta is None or scaling is None or scaling.rope_type != "llama3":
        return None
    scaled, _ = checked_frequencies(model.rope, model.max_position_embeddings)
    powers = np.power(theta, np.arange(0, dim, 2, dtype=np.float64) / dim)
    factors: NDArray[np.float32] = (1.0 / powers / scaled).astype(np.float32)
    return factors
