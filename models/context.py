"""The trained context length of a model, and rope scaling for longer texts."""

from __future__ import annotations

import math

from llmc.models.config import ModelConfig

# Families whose authors recommend a yarn factor for long texts, without training.
_YARN_FAMILIES = frozenset({"qwen2", "qwen3"})


def trained_length(config: ModelConfig) -> int:
    """The longest context, in tokens, of the model's rotary embeddings, rope scaling included.

    Linear, dynamic and yarn scaling multiply the original length by their factor. For llama3, longrope and "factors",
    max_position_embeddings already includes it.
    """
    scaling = config.rope.scaling
    if scaling is None or scaling.rope_type in ("llama3", "factors", "longrope"):
        return config.max_position_embeddings
    stretched = int(scaling.original_max_position_embeddings * scaling.factor)
    return max(config.max_position_embeddings, stretched)


def sound_scaling(config: ModelConfig, length: int) -> dict[str, object]:
    """The rope_parameters for config.json with which a model reads texts of `length` tokens.

    An existing scaling gets a larger factor. Without one: yarn if the family's authors recommend it, else dynamic,
    which changes nothing within the trained length.
    """
    scaling = config.rope.scaling
    original = config.max_position_embeddings if scaling is None else scaling.original_max_position_embeddings
    kind = "yarn" if config.model_type in _YARN_FAMILIES else "dynamic"
    if scaling is not None:
        # The bands of llama3 and "factors" were trained; yarn treats high frequencies likewise.
        kind = "yarn" if scaling.rope_type in ("llama3", "factors", "longrope") else scaling.rope_type
    factor = math.ceil(2 * length / original) / 2
    entry: dict[str, object] = {"rope_type": kind, "factor": factor}
    if scaling is not None and scaling.head_dim is not None and config.local_rope is not None:
        share = config.rope.dim / scaling.head_dim
        entry |= {"partial_rotary_factor": share, "rope_theta": config.rope.theta}
        local = {"rope_type": "default", "rope_theta": config.local_rope.theta}
        return {"full_attention": entry, "sliding_attention": local}
    if kind == "yarn":
        entry["original_max_position_embeddings"] = original
    return entry
