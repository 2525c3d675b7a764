"""What a model is compiled for: to write text, or to give vectors of texts or scores of them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from llmc.models.brief import brief
from llmc.models.config import Dense, ModelConfig, Pooled, Pooling, Task
from llmc.models.errors import ModelError
from llmc.models.families.family import Family, Vectors
from llmc.models.fields import Fields
from llmc.models.files import has_file, read_file
from llmc.task_names import TASKS

MODULES = "modules.json"
POOLING_FILES = ("1_Pooling/config.json",)
"""What sentence-transformers says of a model, beside config.json."""
_MOST_BYTES = 64 << 20
_POOLINGS: Mapping[str, Pooling] = {
    "pooling_mode_cls_token": "first",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "last",
}
_NAMED: Mapping[str, Pooling] = {"cls": "first", "mean": "mean", "lasttoken": "last"}
_ACTIVATIONS: Mapping[str, Literal["sigmoid"] | None] = {"Sigmoid": "sigmoid", "Identity": None}


@dataclass(frozen=True)
class SentenceModel:
    """What sentence-transformers does behind a model."""

    pooling: Pooling
    normalised: bool


def read_sentence_model(folder: Path) -> SentenceModel | None:
    """None where the model is none of sentence-transformers. Raises ModelError for what llmc does not do."""
    file = folder / MODULES
    if not has_file(file):
        return None
    modules = _json(file)
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        raise ModelError(f"{file} is no list of modules; download it again")
    pooling: Pooling | None = None
    normalised = False
    for module in modules:
        kind = str(module.get("type", "")).rpartition(".")[2]
        if kind == "Pooling":
            pooling = _pooling(folder / str(module.get("path", "")) / "config.json")
        elif kind == "Normalize":
            normalised = True
        elif kind != "Transformer":
            raise ModelError(f"{file} has a module {brief(kind)}, which llmc does not know; compile another model")
    if pooling is None:
        raise ModelError(f"{file} has no module Pooling; llmc gives one vector a text")
    return SentenceModel(pooling, normalised)


def _pooling(file: Path) -> Pooling:
    fields = Fields.read(file)
    if fields.has("pooling_mode"):
        mode = fields.text("pooling_mode")
        if mode in _NAMED:
            return _NAMED[mode]
        raise ModelError(f"{file}: pooling_mode {brief(mode)} is not supported; one of {', '.join(_NAMED)}")
    modes = [name for name, on in fields.values.items() if name.startswith("pooling_mode_") and on is True]
    if len(modes) != 1 or modes[0] not in _POOLINGS:
        found = ", ".join(map(brief, modes)) or "none"
        raise ModelError(f"{file}: the pooling modes are {found}; llmc does one of {', '.join(_POOLINGS)}")
    return _POOLINGS[modes[0]]


def _json(file: Path) -> object:
    try:
        return json.loads(read_file(file, _MOST_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{file} cannot be read as JSON ({error}); download it again") from None


def with_task(config: ModelConfig, fields: Fields, family: Family, folder: Path, asked: str) -> ModelConfig:
    """The model as it does a task of TASKS; "auto": what its files say it is for.

    Raises ModelError for one that it cannot do.
    """
    vectors, origin = family.vectors, fields.origin
    if asked not in TASKS:
        raise ModelError(f"task {brief(asked)} is not one of {', '.join(TASKS)}")
    if vectors is None:
        if asked in ("auto", "generate"):
            return config
        raise ModelError(f"{origin}: llmc compiles {family.model_type} models to generate text only, not to {asked}")
    architectures = fields.raw("architectures", [])
    scores = isinstance(architectures, list) and vectors.classifier in architectures
    found = asked
    if asked == "auto":
        found = _found(config, fields, family, folder, scores=scores)
    if found == "generate":
        if not family.generates or config.bidirectional or scores:
            raise ModelError(f"{origin}: this model writes no text; compile it with --task embed, rank or classify")
        return config
    if found == "embed":
        sentence = read_sentence_model(folder) or SentenceModel(vectors.pooling, True)
        return replace(config, pooled=Pooled(sentence.pooling, (), sentence.normalised), task=Task("embed"))
    if scores:
        return _scoring(config, fields, vectors, found)
    if found == "rank" and vectors.rank_tokens:
        ids = _token_ids(folder / "tokenizer.json", vectors.rank_tokens, config.vocab_size)
        pooled = Pooled("last", (Dense(len(ids), token_ids=ids),))
        return replace(config, pooled=pooled, task=Task("rank", "softmax", template=vectors.rank_template))
    wanted = vectors.classifier or "a classifier"
    raise ModelError(f"{origin}: --task {found} needs a checkpoint of {wanted}, and this is {brief(architectures)}")


def _found(config: ModelConfig, fields: Fields, family: Family, folder: Path, *, scores: bool) -> str:
    if scores:
        return "rank" if len(_labels(fields)) == 1 else "classify"
    embeds = not family.generates or config.bidirectional or has_file(folder / MODULES)
    return "embed" if embeds else "generate"


def _labels(fields: Fields) -> tuple[str, ...]:
    """Their names, in order; without any there are two, as transformers has it."""
    names = fields.raw("id2label", None) if fields.has("id2label") else None
    if names is None:
        count = fields.integer("num_labels", 2, maximum=1 << 16)
        return tuple(f"LABEL_{i}" for i in range(count))
    if not isinstance(names, dict) or {str(i) for i in range(len(names))} != names.keys():
        raise ModelError(f"{fields.origin}: field 'id2label' is {brief(names)} where names of 0, 1, … were expected")
    return tuple(str(names[str(i)]) for i in range(len(names)))


def _scoring(config: ModelConfig, fields: Fields, vectors: Vectors, name: str) -> ModelConfig:
    assert vectors.head is not None
    labels = _labels(fields)
    pooled, typed = vectors.head(config, fields, len(labels)), config.token_types > 1
    multi = fields.text("problem_type", "") == "multi_label_classification"
    if name == "rank":
        if len(labels) != 1:
            raise ModelError(f"{fields.origin}: --task rank needs a model of one label, and this has {len(labels)}")
        task = Task("rank", _activation(fields), template=vectors.rank_template or None)
    else:
        task = Task("classify", "sigmoid" if multi or len(labels) == 1 else "softmax", labels)
    return replace(config, pooled=pooled, task=task, typed_inputs=typed)


def _activation(fields: Fields) -> Literal["sigmoid"] | None:
    """Of a score, as sentence-transformers has it: a sigmoid unless the config says otherwise."""
    said = fields.raw("sbert_ce_default_activation_function", "")
    table = fields.raw("sentence_transformers", {})
    if isinstance(table, dict):
        said = table.get("activation_fn") or said
    kind = str(said or "Sigmoid").rpartition(".")[2]
    if kind not in _ACTIVATIONS:
        raise ModelError(f"{fields.origin}: the activation of scores {brief(kind)} is not Sigmoid or Identity")
    return _ACTIVATIONS[kind]


def _token_ids(file: Path, tokens: tuple[str, ...], vocab_size: int) -> tuple[int, ...]:
    """Ids of whole tokens. Raises ModelError where the tokenizer has one not."""
    if not has_file(file):
        raise ModelError(f"{file} is missing; --task rank looks for the tokens {', '.join(tokens)} in it")
    content = _json(file)
    vocabulary = content.get("model", {}).get("vocab") if isinstance(content, dict) else None
    ids = tuple(vocabulary.get(token) if isinstance(vocabulary, dict) else None for token in tokens)
    if not all(isinstance(token, int) and 0 <= token < vocab_size for token in ids):
        raise ModelError(f"{file} has no tokens {', '.join(tokens)}, by which --task rank scores")
    return tuple(int(token) for token in ids if token is not None)
