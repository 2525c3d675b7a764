"""Families by exact model_type, and building a model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmc.models.brief import brief
from llmc.models.config import ModelConfig
from llmc.models.errors import ModelError
from llmc.models.families.family import Family
from llmc.models.families.llama import LLAMA
from llmc.models.families.mistral import MISTRAL
from llmc.models.families.qwen2 import QWEN2
from llmc.models.families.qwen3 import QWEN3

if TYPE_CHECKING:
    from llmc.models.blocks.decoder import Decoder

FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (
        LLAMA,
        MISTRAL,
        QWEN2,
        QWEN3,
    )
}


def get_family(model_type: str) -> Family:
    """The family of config.json's model_type; raises ModelError naming the supported ones."""
    family = FAMILIES.get(model_type)
    if family is None:
        raise ModelError(f"model_type {brief(model_type)} is not supported; supported are {', '.join(FAMILIES)}")
    return family


def build_model(config: ModelConfig, act_dtype: str, max_len: int) -> Decoder:
    """The module of `config` without values, on the default device: use `with torch.device("meta")` to only trace it.

    act_dtype: "f32" or "bf16". max_len: positions of the buffer rope.cos_sin.
    """
    return get_family(config.model_type).build(config, act_dtype, max_len)
