"""The task that a model is compiled for: generating text, embedding texts, or scoring them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Literal

from llmc.models.brief import brief
from llmc.models.config import ModelConfig
from llmc.models.errors import ModelError
from llmc.models.families.family import Family, Vectors
from llmc.models.fields import Fields
from llmc.models.files import has_file
from llmc.models.pooled import Dense, Pooled, Pooling, Task
from llmc.models.rank_prompts import RANK_TEMPLATES, shows_prompt
from llmc.models.sentence_model import MODULES, SentenceModel, read_json, read_sentence_model, stated_activation
from llmc.task_names import POOLINGS, RANK_PROMPTS, TASKS

_POOLINGS: Mapping[str, Pooling] = {"mean": "mean", "cls": "first", "last": "last"}
_ACTIVATIONS: Mapping[str, Literal["sigmoid"] | None] = {"Sigmoid": "sigmoid", "Identity": None}


def pooling_name(pooled: Pooled | None) -> str:
    """The name that `--pooling` has for a model's pooling."""
    return next((name for name, kind in _POOLINGS.items() if pooled is not None and kind == pooled.pooling), "auto")


def with_task(
    config: ModelConfig,
    fields: Fields,
    family: Family,
    folder: Path,
    asked: str,
    pooling: str = "auto",
    rank_prompt: str = "auto",
) -> ModelConfig:
    """The model set up for a task of TASKS, with a pooling of POOLINGS and a prompt of RANK_PROMPTS; "auto" follows its
    files.

    Raises ModelError for a task that it cannot do.
    """
    doing = with_pooling(_doing(config, fields, family, folder, asked), fields.origin, pooling)
    return with_rank_prompt(doing, fields.origin, rank_prompt)


def with_rank_prompt(config: ModelConfig, origin: str, prompt: str) -> ModelConfig:
    """The model with a prompt of RANK_PROMPTS; "auto" keeps its own. Raises ModelError if it ranks no pairs."""
    if prompt not in RANK_PROMPTS:
        raise ModelError(f"rank prompt {brief(prompt)} is not one of {', '.join(RANK_PROMPTS)}")
    if prompt == "auto":
        return config
    if config.task is None or config.task.name != "rank":
        does = "generate" if config.task is None else config.task.name
        raise ModelError(
            f"{origin}: --rank-prompt {prompt} is for pairs of texts, and this model is compiled to {does}; leave it "
            "out, or give --task rank"
        )
    return replace(config, task=replace(config.task, template=RANK_TEMPLATES.get(prompt)))


def with_pooling(config: ModelConfig, origin: str, pooling: str) -> ModelConfig:
    """The model with a pooling of POOLINGS; "auto" keeps its own. Raises ModelError if it pools no rows."""
    if pooling not in POOLINGS:
        raise ModelError(f"pooling {brief(pooling)} is not one of {', '.join(POOLINGS)}")
    if pooling == "auto":
        return config
    if config.pooled is None or config.task is None or config.task.name != "embed":
        does = "generate" if config.task is None else config.task.name
        raise ModelError(
            f"{origin}: --pooling {pooling} is for embeddings, and this model is compiled to {does}; leave it "
            "out, or give --task embed"
        )
    return replace(config, pooled=replace(config.pooled, pooling=_POOLINGS[pooling]))


def _doing(config: ModelConfig, fields: Fields, family: Family, folder: Path, asked: str) -> ModelConfig:
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
        sentence = read_sentence_model(folder, config.hidden_size) or SentenceModel(vectors.pooling, True)
        pooled = Pooled(sentence.pooling, sentence.dense, sentence.normalised)
        return replace(config, pooled=pooled, task=Task("embed", longest_text=sentence.longest))
    if scores:
        return _scoring(config, fields, vectors, folder, found)
    if found == "rank" and vectors.rank_tokens:
        ids = _token_ids(folder / "tokenizer.json", vectors.rank_tokens, config.vocab_size)
        pooled = Pooled("last", (Dense(len(ids), token_ids=ids),))
        return replace(
            config, pooled=pooled, task=Task("rank", "softmax", template=RANK_TEMPLATES[vectors.rank_prompt])
        )
    wanted = vectors.classifier or "a classifier"
    raise ModelError(f"{origin}: --task {found} needs a checkpoint of {wanted}, and this is {brief(architectures)}")


def _found(config: ModelConfig, fields: Fields, family: Family, folder: Path, *, scores: bool) -> str:
    if scores:
        return "rank" if len(labels_of(fields)) == 1 else "classify"
    embeds = not family.generates or config.bidirectional or has_file(folder / MODULES)
    return "embed" if embeds else "generate"


def labels_of(fields: Fields) -> tuple[str, ...]:
    """Label names, in order; two by default, as in transformers."""
    names = fields.raw("id2label", None) if fields.has("id2label") else None
    if names is None:
        count = fields.integer("num_labels", 2, maximum=1 << 16)
        return tuple(f"LABEL_{i}" for i in range(count))
    if not isinstance(names, dict) or not names or {str(i) for i in range(len(names))} != names.keys():
        raise ModelError(f"{fields.origin}: field 'id2label' is {brief(names)} where names of 0, 1, … were expected")
    found = tuple(str(names[str(i)]) for i in range(len(names)))
    name, count = Counter(found).most_common(1)[0]
    if count > 1:
        raise ModelError(f"{fields.origin}: field 'id2label' has the name {brief(name)} twice; give each label its own")
    return found


def _scoring(config: ModelConfig, fields: Fields, vectors: Vectors, folder: Path, name: str) -> ModelConfig:
    assert vectors.head is not None
    labels = labels_of(fields)
    pooled, typed = vectors.head(config, fields, len(labels)), vectors.typed_pairs and config.token_types > 1
    prompt = vectors.rank_prompt
    template = RANK_TEMPLATES[prompt] if name == "rank" and prompt and shows_prompt(folder, prompt) else None
    task = scoring_task(fields, labels, name, folder, template)
    if pooled.pooling == "last" and not config.bidirectional:
        task = replace(task, pad_token_id=_padding(fields, config.vocab_size))
    return replace(config, pooled=pooled, task=task, typed_inputs=typed)


def scoring_task(fields: Fields, labels: tuple[str, ...], name: str, folder: Path, template: str | None = None) -> Task:
    """name: rank or classify. folder: of the files of sentence-transformers.

    Raises ModelError if a model with these labels cannot do it.
    """
    if name == "rank":
        if len(labels) != 1:
            raise ModelError(f"{fields.origin}: --task rank needs a model of one label, and this has {len(labels)}")
        return Task("rank", _activation(fields, folder), template=template)
    multi = fields.text("problem_type", "") == "multi_label_classification"
    return Task("classify", "sigmoid" if multi or len(labels) == 1 else "softmax", labels)


def _padding(fields: Fields, vocab_size: int) -> int | None:
    """The token whose row a classifier never takes, as in transformers: tokenizers may append it."""
    token = fields.raw("pad_token_id", None)
    return token if type(token) is int and 0 <= token < vocab_size else None


def _activation(fields: Fields, folder: Path) -> Literal["sigmoid"] | None:
    """Activation of a score, as in sentence-transformers: sigmoid unless its own file or the config says otherwise."""
    said = fields.raw("sbert_ce_default_activation_function", "")
    table = fields.raw("sentence_transformers", {})
    if isinstance(table, dict):
        said = table.get("activation_fn") or said
    said = stated_activation(folder) or said
    kind = str(said or "Sigmoid").rpartition(".")[2]
    if kind not in _ACTIVATIONS:
        raise ModelError(f"{fields.origin}: the activation of scores {brief(kind)} is not Sigmoid or Identity")
    return _ACTIVATIONS[kind]


def _token_ids(file: Path, tokens: tuple[str, ...], vocab_size: int) -> tuple[int, ...]:
    """Ids of whole tokens. Raises ModelError if the tokenizer lacks one."""
    if not has_file(file):
        raise ModelError(f"{file} is missing; --task rank looks for the tokens {', '.join(tokens)} in it")
    content = read_json(file)
    vocabulary = content.get("model", {}).get("vocab") if isinstance(content, dict) else None
    ids = tuple(vocabulary.get(token) if isinstance(vocabulary, dict) else None for token in tokens)
    if not all(isinstance(token, int) and 0 <= token < vocab_size for token in ids):
        raise ModelError(f"{file} has no tokens {', '.join(tokens)}, by which --task rank scores")
    return tuple(int(token) for token in ids if token is not None)
