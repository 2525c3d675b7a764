"""xIELU's parameters per layer: metadata in GGUF, tensors in checkpoints."""

from __future__ import annotations

import math

import numpy as np

from llmc.models.config import ModelConfig
from llmc.models.convert import Array
from llmc.models.errors import ModelError
from llmc.models.sources.gguf.metadata import Metadata

_LEARNED = ("alpha_p", "alpha_n")
_CONSTANTS = {"beta": 0.5, "eps": -1e-6}
"""Constants of every such model."""


def activation_values(metadata: Metadata, config: ModelConfig) -> dict[str, Array]:
    """Values by checkpoint tensor name; empty for other activations. Raises ModelError."""
    if config.activation != "xielu":
        return {}
    for name, value in _CONSTANTS.items():
        key = f"xielu.{name}"
        for found in _numbers(metadata, key, config.num_layers) if metadata.has(key) else ():
            if not math.isclose(found, value, rel_tol=1e-2):
                raise ModelError(f"{metadata.origin}: metadata {key} has {found}, which is not {value}")
    return {
        f"model.layers.{layer}.mlp.act_fn.{name}": np.array([value], np.float32)
        for name in _LEARNED
        for layer, value in enumerate(_numbers(metadata, f"xielu.{name}", config.num_layers))
    }


def _numbers(metadata: Metadata, key: str, count: int) -> list[float]:
    """One number per layer."""
    array = metadata.array(key)
    if array is None:
        raise metadata.missing(key)
    numbers = array.numbers()
    if len(numbers) != count:
        raise metadata.wrong(key, f"a list of {count} numbers")
    return numbers
