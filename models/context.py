"""How long a text a model was trained for, and the rope scaling with which it reads a longer one."""

from __future__ import annotations

import math

from llmc.models.config import ModelConfig

# Families whose authors give a factor of yarn for long texts: it needs no training there.
_YARN_FAMILIES = frozenset({"qwen2", "qwen3"})


def trained_length(config: ModelConfig) -> int:
    """Tokens of the longest text that the model's rotary embeddings are made for, its rope scaling counted in.

    Linear, dynamic and yarn scaling stretch their original length by the factor. That of llama3, of longrope, and of
    factors one by one, is part of max_position_embeddings, as in the checkpoints that have it.
    """
    scaling = config.rope.scaling
    if scaling is None or scaling.rope_type in ("llama3", "factors", "longrope"):
        return config.max_position_embeddings
    stretched = int(scaling.original_max_position_embeddings * scaling.factor)
    return max(config.max_position_embeddings, stretched)


def sound_scaling(config: ModelConfig, length: int) -> dict[str, object]:
    """What rope_parameters of a config.json must have for a model to read texts of `length` tokens.

    A scaling that the model has gets a larger factor. Without one: yarn where the family's authors recommend it, else
    dynamic, which changes nothing up to the trained length.
    """
    scaling = config.rope.scaling
    original = config.max_position_embeddings if scaling is None else scaling.original_max_position_embeddings
    kind = "yarn" if config.model_type in _YARN_FAMILIES else "dynamic"
    if scaling is not None:
        # The bands of llama3, which factors are as well, were trained; yarn keeps high frequencies as they do.
        kind = "yarn" if scaling.rope_type in ("llama3", "factors", "longrope") else scaling.rope_type
    factor = math.ceil(2 * length / original) / 2
    entry: dict[str, object] = {"rope_type": kind, "factor": factor}
    if kind == "yarn":
        entry["original_max_position_embeddings"] = original
    return entry
