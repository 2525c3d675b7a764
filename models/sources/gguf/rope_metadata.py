"""Scaling of rotary frequencies in a GGUF file: metadata, or factor tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from llmc.models.brief import brief
from llmc.models.config import ModelConfig
from llmc.models.convert import Array
from llmc.models.errors import ModelError
from llmc.models.rotary import Rope, RopeScaling
from llmc.models.sources.gguf.architecture import LONG_FACTORS, ROPE_FACTORS, SHORT_FACTORS
from llmc.models.sources.gguf.metadata import Metadata

Factors = Mapping[str, Array]
"""Factors by tensor name."""
_NEVER = 1e30  # divides frequencies of pairs that are not rotated


def rope_scaling(metadata: Metadata, key: str, context: int, factors: Factors) -> dict[str, Any] | None:
    """`rope_scaling` in config.json's form. key: of the metadata. context: longest text in tokens."""
    kind = metadata.text(f"{key}.type", "none")
    factor = metadata.number(f"{key}.factor", 0.0)
    if LONG_FACTORS in factors or SHORT_FACTORS in factors:
        return _longrope(metadata, key, context, factors, kind)
    if kind == "none" or (kind == "linear" and factor in (0.0, 1.0)):
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind == "longrope":
        raise ModelError(f"{metadata.origin} lacks the tensor {LONG_FACTORS}, which {key}.type longrope needs")
    if kind != "yarn":
        raise ModelError(
            f"{metadata.origin}: metadata {key}.type is {brief(kind)}, which is not one of none, linear, yarn, longrope"
        )
    return _yarn(metadata, key, context, factor)


def _yarn(metadata: Metadata, key: str, context: int, factor: float) -> dict[str, Any]:
    scaling: dict[str, Any] = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": metadata.integer(f"{key}.original_context_length", context),
    }
    for name in ("beta_fast", "beta_slow"):
        if metadata.has(f"{key}.yarn_{name}"):
            scaling[name] = metadata.number(f"{key}.yarn_{name}")
    attention = metadata.number(f"{key}.attn_factor", 1.0)
    if attention != 1.0:
        scaling["attention_factor"] = attention * (1.0 + 0.1 * math.log(max(factor, 1.0)))
    return scaling


def latent_yarn(metadata: Metadata, key: str, scaling: dict[str, Any] | None) -> dict[str, Any] | None:
    """The same for latent attention: scores grow as the metadata say; cosines do not."""
    if scaling is None or scaling["rope_type"] != "yarn":
        return scaling
    grown = metadata.number(f"{key}.yarn_log_multiplier", 0.0)
    if not grown:
        return {**scaling, "attention_factor": 1.0}
    # A tenth of the checkpoint's value, as a float32.
    multiplier = round(10 * grown, 7)
    return {**scaling, "mscale": multiplier, "mscale_all_dim": multiplier}


def _longrope(metadata: Metadata, key: str, context: int, factors: Factors, kind: str) -> dict[str, Any]:
    for name in (LONG_FACTORS, SHORT_FACTORS):
        if name not in factors:
            raise ModelError(f"{metadata.origin} lacks the tensor {name}, beside the other factors; convert it again")
        _check(factors[name], name, metadata.origin)
    if kind not in ("none", "longrope"):
        raise ModelError(f"{metadata.origin} has {LONG_FACTORS} beside {key}.type {brief(kind)}; convert it again")
    original = metadata.integer(f"{key}.original_context_length", context)
    scaling: dict[str, Any] = {
        "rope_type": "longrope",
        "original_max_position_embeddings": original,
        "short_factor": [float(f) for f in factors[SHORT_FACTORS]],
        "long_factor": [float(f) for f in factors[LONG_FACTORS]],
    }
    attention = metadata.number(f"{key}.attn_factor", 1.0)
    usual = math.sqrt(1 + math.log(context / original) / math.log(original)) if context > original > 1 else 1.0
    if not math.isclose(attention, usual, rel_tol=1e-6):
        scaling["attention_factor"] = attention
    return scaling


def _check(factors: Array, name: str, origin: str) -> None:
    if not bool((np.isfinite(factors) & (factors > 0)).all()):
        bad = float(factors[~(np.isfinite(factors) & (factors > 0))][0])
        raise ModelError(f"{origin}: tensor {name} has the factor {bad}; download the file again")


def with_factors(config: ModelConfig, factors: Array, origin: str) -> Rope:
    """The model's rope with divisors of its frequencies, which exclude any other scaling."""
    if factors.shape != (config.rope.dim // 2,):
        raise ModelError(
            f"{origin}: tensor {ROPE_FACTORS} has shape {list(factors.shape)} where the metadata imply "
            f"[{config.rope.dim // 2}]; download the file again"
        )
    _check(factors, ROPE_FACTORS, origin)
    if bool((factors == 1).all()):
        return config.rope
    if config.rope.scaling is not None:
        raise ModelError(
            f"{origin} has both {ROPE_FACTORS} and rope scaling {config.rope.scaling.rope_type}, of which llmc "
            "knows no order; convert the model again"
        )
    length, plain = config.max_position_embeddings, int((factors == 1).argmin())
    head_dim = config.head_dim if config.full_heads is None else config.full_heads.head_dim
    if plain and config.rope.dim == head_dim and bool((factors[plain:] >= _NEVER).all()):
        scaling = RopeScaling("proportional", 1.0, length, head_dim=head_dim)
        return replace(config.rope, dim=2 * plain, scaling=scaling)
    scaling = RopeScaling("factors", 1.0, length, frequency_factors=tuple(float(f) for f in factors))
    return replace(config.rope, scaling=scaling)
