"""Vectors from Llama-like text models: the last token has seen all of its text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypedDict

from llmc.models.config import ModelConfig
from llmc.models.families.family import Vectors
from llmc.models.fields import Fields
from llmc.models.layout import LLAMA_LAYOUT
from llmc.models.pooled import Dense, Pooled
from llmc.models.weight_map import WeightMap

_LAYOUT = replace(LLAMA_LAYOUT, dense=("score",))


class TextVectors(TypedDict):
    """Fields of Family."""

    weight_map: Callable[[ModelConfig], WeightMap]
    other_maps: tuple[Callable[[ModelConfig], WeightMap], ...]
    vectors: Vectors


def _head(config: ModelConfig, fields: Fields, labels: int) -> Pooled:
    return Pooled("last", (Dense(labels),))


def text_vectors(classifier: str, rank_tokens: tuple[str, ...] = (), rank_prompt: str = "") -> TextVectors:
    """See `Vectors`. Embedding checkpoints omit the prefix of the whole model."""
    return {
        "weight_map": _LAYOUT.weight_map,
        "other_maps": (_LAYOUT.moved("model.", "").weight_map,),
        "vectors": Vectors("last", classifier, _head, rank_tokens=rank_tokens, rank_prompt=rank_prompt),
    }
