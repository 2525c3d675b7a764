"""The format in which PEFT stores a LoRA adapter: names and configuration rules, for compiler and runtime."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
TORCH_WEIGHTS = "adapter_model.bin"
"""Weights as torch saves them, which older versions of PEFT wrote; a file of safetensors beside it goes first."""
PREFIX = "base_model.model."
"""Prefix of all tensor names."""
PARTS = {
    ".lora_A.weight": "a", ".lora_B.weight": "b", ".lora_magnitude_vector": "length",
    ".lora_magnitude_vector.weight": "length", ".lora_embedding_A": "a", ".lora_embedding_B": "b",
}  # fmt: skip
"""Role of a tensor in its module, by the suffix of its name."""
BASE_WEIGHT = ".base_layer.weight"
"""End of the name of a layer's own weight, which PEFT saves with adapters of embeddings and output projections."""
EMBEDDING_PART = ".lora_embedding_"
PARAMETERS = "target_parameters"
"""Configuration key of parameters that are changed as layers are, of experts above all."""
OTHER_BASES = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Prefixes of init_lora_weights for adapters that change the base weights."""
_READ = """
    peft_type r lora_alpha rank_pattern alpha_pattern use_rslora use_dora init_lora_weights target_parameters
    """
# What was trained, from where, and how; tensors and their names say all of it that matters.
_OF_TRAINING = """
    auto_mapping base_model_name_or_path bias corda_config ensure_weight_tying eva_config exclude_modules
    fan_in_fan_out inference_mode layers_pattern layers_to_transform loftq_config lora_dropout lora_dtype lora_ga_config
    lorap_emb_lr lorap_lr_ratio megatron_config megatron_core merge_weights modules_to_save peft_version
    qalora_group_size revision runtime_config target_modules task_type
    """
_KNOWN = frozenset((_READ + _OF_TRAINING).split())

_WRAPPERS = frozenset({"backbone", "model", "language_model", "text_model"})
_RENAMED = {"block_sparse_moe": "mlp"}
"""Of checkpoints, in transformers 5."""
_MOST_DIGITS = 9


class PatternError(ValueError):
    """An invalid pattern in the configuration; the message says why."""

    def __init__(self, pattern: str, why: str) -> None:
        super().__init__(why)
        self.pattern = pattern


def unknown_setting(config: Mapping[str, Any]) -> str | None:
    """The first key of a configuration that may make an adapter more than LoRA, as new kinds do; None if there is none.

    PEFT writes the keys of all kinds that it knows, and for those that an adapter is not of something false or empty.
    """
    return next((name for name, value in config.items() if value and name not in _KNOWN), None)


def split_name(name: str) -> tuple[str, str] | None:
    """(module, suffix from PARTS) of a tensor name; None if it is not part of LoRA."""
    end = next((end for end in PARTS if name.endswith(end)), None)
    return None if end is None else (name.removesuffix(end), end)


def pattern_of(patterns: Iterable[str], module: str) -> str | None:
    """The first pattern that matches the end of a module's name, which is PEFT's rule. Raises PatternError."""
    for pattern in patterns:
        try:
            fits = re.match(rf"(.*\.)?({pattern})$", module)
        except re.error as error:
            raise PatternError(pattern, str(error)) from None
        if fits:
            return pattern
    return None


def scale_of(alpha: float, rank: int, *, rank_stabilised: bool) -> float:
    """Factor on the product of the matrices. rank_stabilised: `use_rslora`."""
    return alpha / (math.sqrt(rank) if rank_stabilised else rank)


def is_unread(name: str, modules: Sequence[str]) -> bool:
    """Whether a name begins with one of `modules`: parts of a model that llmc does not run, such as a tower for images.

    Checkpoints and versions of transformers differ in whether names begin with `model.`
    """
    return any(form.startswith(tuple(modules)) for form in (name, name.removeprefix("model."), f"model.{name}"))


def in_layer(name: str) -> str:
    """A name within a decoder, the same whether it was trained alone or as a part; empty outside of layers."""
    parts = [_RENAMED.get(part, part) for part in name.split(".") if part not in _WRAPPERS]
    return ".".join(parts) if _number_at(parts) is not None else ""


def layer_of(name: str) -> str:
    """The name of the layer that a name is in, as `in_layer` has it; empty for none."""
    parts = in_layer(name).split(".")
    at = _number_at(parts)
    return "" if at is None else ".".join(parts[: at + 1])


def _number_at(parts: Sequence[str]) -> int | None:
    """Where the layer's number is."""
    numbers = (at for at, part in enumerate(parts) if part.isascii() and part.isdigit() and len(part) <= _MOST_DIGITS)
    return next(numbers, None)
