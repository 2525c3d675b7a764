"""What PEFT writes of a LoRA adapter: names, and the rules of its configuration; for compiler and runtime alike."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
"""What the names of all tensors begin with."""
PARTS = {
    ".lora_A.weight": "a", ".lora_B.weight": "b", ".lora_magnitude_vector": "length",
    ".lora_magnitude_vector.weight": "length", ".lora_embedding_A": "a", ".lora_embedding_B": "b",
}  # fmt: skip
"""What a tensor is to its module, by the end of its name."""
EMBEDDING_PART = ".lora_embedding_"
OTHER_BASES = ("pissa", "olora", "corda", "loftq")
"""Beginnings of init_lora_weights of adapters that change the weights they are added to."""
UNKNOWN_KINDS = ("lora_bias", "alora_invocation_tokens", "trainable_token_indices", "target_parameters")
"""Keys of the configuration of adapters that are more than LoRA."""


class PatternError(ValueError):
    """A pattern of the configuration that is none; the message says why."""

    def __init__(self, pattern: str, why: str) -> None:
        super().__init__(why)
        self.pattern = pattern


def split_name(name: str) -> tuple[str, str] | None:
    """The module of a tensor and the end of its name, one of PARTS; None for what is no part of LoRA."""
    end = next((end for end in PARTS if name.endswith(end)), None)
    return None if end is None else (name.removesuffix(end), end)


def pattern_of(patterns: Iterable[str], module: str) -> str | None:
    """The first pattern that is the end of a module's name, as PEFT looks numbers up. Raises PatternError."""
    for pattern in patterns:
        try:
            fits = re.match(rf"(.*\.)?({pattern})$", module)
        except re.error as error:
            raise PatternError(pattern, str(error)) from None
        if fits:
            return pattern
    return None


def scale_of(alpha: float, rank: int, *, rank_stabilised: bool) -> float:
    """What the product of the matrices is multiplied by. rank_stabilised: `use_rslora`."""
    return alpha / (math.sqrt(rank) if rank_stabilised else rank)
