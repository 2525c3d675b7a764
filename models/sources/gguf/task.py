"""The task that a GGUF file is compiled for: generating text, embedding texts, or scoring them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from llmc.models.brief import brief
from llmc.models.config import ModelConfig
from llmc.models.errors import ModelError
from llmc.models.families.family import Family
from llmc.models.pooled import Dense, Pooled, Pooling, Task
from llmc.models.sources.gguf.metadata import Metadata
from llmc.models.tasks import with_pooling
from llmc.task_names import TASKS

_POOLINGS: Mapping[int, Pooling] = {1: "mean", 2: "first", 3: "last"}
_UNSAID, _RANK = 0, 4
_FIRST, _LAST = "cls", "cls.output"


def with_task_of_file(
    config: ModelConfig,
    metadata: Metadata,
    key: str,
    family: Family,
    shapes: Mapping[str, tuple[int, ...]],
    asked: str,
    pooling: str,
) -> ModelConfig:
    """The model set up for a task of TASKS and a pooling of POOLINGS; "auto" follows the file. key: prefix of metadata
    on pooling. Raises ModelError for a task it cannot do."""
    return with_pooling(_doing(config, metadata, key, family, shapes, asked), metadata.origin, pooling)


def _doing(
    config: ModelConfig,
    metadata: Metadata,
    key: str,
    family: Family,
    shapes: Mapping[str, tuple[int, ...]],
    asked: str,
) -> ModelConfig:
    origin = metadata.origin
    if asked not in TASKS:
        raise ModelError(f"task {brief(asked)} is not one of {', '.join(TASKS)}")
    if family.vectors is None:
        if asked in ("auto", "generate"):
            return config
        raise ModelError(f"{origin}: llmc compiles {family.model_type} models to generate text only, not to {asked}")
    kind = metadata.integer(key, _UNSAID, minimum=_UNSAID, maximum=_RANK)
    found = asked if asked != "auto" else _found(config, family, kind)
    if found == "generate":
        if config.bidirectional:
            raise ModelError(f"{origin}: this model writes no text; compile it with --task embed")
        return config
    if found == "embed":
        pooled = Pooled(_POOLINGS.get(kind, family.vectors.pooling), normalised=True)
        return replace(config, pooled=pooled, task=Task("embed"))
    if found == "rank" and kind == _RANK and _has_head(shapes):
        return _ranking(config, origin, shapes)
    raise ModelError(
        f"{origin}: --task {found} needs a GGUF file of a reranker, with {key} {_RANK} and the tensors {_FIRST}.weight "
        f"and {_LAST}.weight; compile the checkpoint that it was converted from"
    )


def _found(config: ModelConfig, family: Family, kind: int) -> str:
    if kind == _RANK:
        return "rank"
    return "embed" if config.bidirectional or not family.generates or kind != _UNSAID else "generate"


def _has_head(shapes: Mapping[str, tuple[int, ...]]) -> bool:
    return all(f"{name}.{part}" in shapes for name in (_FIRST, _LAST) for part in ("weight", "bias"))


def _ranking(config: ModelConfig, origin: str, shapes: Mapping[str, tuple[int, ...]]) -> ModelConfig:
    """Scores from the first row, as RoBERTa's classifier does."""
    labels = shapes[f"{_LAST}.weight"][0]
    if labels != 1:
        raise ModelError(f"{origin}: --task rank needs a model of one label, and this has {labels}")
    pooled = Pooled("first", (Dense(config.hidden_size, True, "tanh"), Dense(1, True)))
    return replace(config, pooled=pooled, task=Task("rank", "sigmoid"), typed_inputs=config.token_types > 1)
