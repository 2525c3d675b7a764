"""Reads sentence-transformers' modules.json, and the directory of each module after the transformer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from llmc.models.brief import brief
from llmc.models.errors import ModelError
from llmc.models.fields import Fields
from llmc.models.files import has_file, read_file
from llmc.models.pooled import Dense, Pooling

MODULES = "modules.json"
_SETTINGS = ("sentence_bert_config.json", "sentence_roberta_config.json", "sentence_xlm-roberta_config.json")
_WHOLE, _TOKENIZER = "config_sentence_transformers.json", "tokenizer_config.json"
SENTENCE_FILES = (*_SETTINGS, _WHOLE, "1_Pooling/config.json", "*_Dense/config.json", "*_Dense/model.safetensors")
"""Patterns of files besides config.json and modules.json."""
_MOST_BYTES = 64 << 20
_MOST_DENSE = 16
_MOST_TOKENS = 1 << 24
_POOLINGS: Mapping[str, Pooling] = {
    "pooling_mode_cls_token": "first",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "last",
}
_NAMED: Mapping[str, Pooling] = {"cls": "first", "mean": "mean", "lasttoken": "last"}
_TANH = "torch.nn.modules.activation.Tanh"
_ACTIVATIONS: Mapping[str, Literal["tanh", "gelu"] | None] = {
    _TANH: "tanh",
    "torch.nn.modules.activation.GELU": "gelu",
    "torch.nn.modules.linear.Identity": None,
}


@dataclass(frozen=True)
class SentenceModel:
    """The steps after a model: pooling, linear layers over the pooled row, optional normalisation.

    longest: tokens at which sentence-transformers cuts a text; None if the files do not say.
    """

    pooling: Pooling
    normalised: bool
    dense: tuple[Dense, ...] = ()
    longest: int | None = None


def read_sentence_model(folder: Path, hidden_size: int) -> SentenceModel | None:
    """None unless the model is from sentence-transformers. Raises ModelError for unsupported modules."""
    file = folder / MODULES
    if not has_file(file):
        return None
    modules = read_json(file)
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        raise ModelError(f"{file} is not a list of modules; download it again")
    pooling: Pooling | None = None
    normalised, dense, columns = False, list[Dense](), hidden_size
    for module in modules:
        kind = str(module.get("type", "")).rpartition(".")[2]
        if normalised or (kind == "Pooling" and pooling is not None) or (kind == "Dense" and pooling is None):
            raise ModelError(
                f"{file} has a module {brief(kind)} out of order; llmc does Transformer, Pooling, any Dense, Normalize"
            )
        if kind == "Pooling":
            pooling = _pooling(_place(file, module) / "config.json")
        elif kind == "Normalize":
            normalised = True
        elif kind == "Dense":
            dense.append(_dense(_place(file, module), columns))
            columns = dense[-1].size
        elif kind != "Transformer":
            raise ModelError(f"{file} has a module {brief(kind)}, which llmc does not know; compile another model")
    if pooling is None:
        raise ModelError(f"{file} has no module Pooling; llmc gives one vector a text")
    if len(dense) > _MOST_DENSE:
        raise ModelError(f"{file} has {len(dense)} modules Dense; llmc does at most {_MOST_DENSE}")
    return SentenceModel(pooling, normalised, tuple(dense), _longest(folder))


def left_to_callers(folder: Path) -> tuple[str, ...]:
    """Sentences on what sentence-transformers does to every text of the model, and llmc does not."""
    found, settings = [], _settings(folder)
    if settings.flag("do_lower_case", False):
        found.append(
            f"{settings.origin}: sentence-transformers turns texts into lower case (do_lower_case), and llmc only if "
            "the tokenizer does: give texts in lower case"
        )
    prompts = _fields(folder, _WHOLE)
    if prompts.has("default_prompt_name"):
        name, texts = prompts.text("default_prompt_name"), prompts.table("prompts")
        prompt = "" if texts is None else texts.text(name, "")
        if prompt:
            found.append(
                f"{prompts.origin}: sentence-transformers puts {brief(prompt)} before every text "
                "(default_prompt_name), and llmc does not: put it there yourself"
            )
    return tuple(found)


def stated_activation(folder: Path) -> str | None:
    """The function on scores that newer versions of sentence-transformers write beside config.json."""
    fields = _fields(folder, _WHOLE)
    return fields.text("activation_fn") if fields.has("activation_fn") else None


def _fields(folder: Path, name: str) -> Fields:
    """Of an optional file."""
    return Fields.read(folder / name) if has_file(folder / name) else Fields({}, name)


def _settings(folder: Path) -> Fields:
    """How sentence-transformers reads texts; empty if no file says."""
    found = next((name for name in _SETTINGS if has_file(folder / name)), None)
    return Fields({}, MODULES) if found is None else _fields(folder, found)


def _longest(folder: Path) -> int | None:
    fields = _settings(folder)
    if fields.has("max_seq_length"):
        return fields.integer("max_seq_length", maximum=_MOST_TOKENS)
    # Newer versions leave it to the tokenizer, in which a huge number means none.
    length = _fields(folder, _TOKENIZER).raw("model_max_length", None)
    return length if type(length) is int and 0 < length <= _MOST_TOKENS else None


def _place(file: Path, module: Mapping[str, object]) -> Path:
    """The directory of a module, beside modules.json."""
    name = module.get("path")
    if not isinstance(name, str) or Path(name).name != name or not name.isprintable() or not name:
        raise ModelError(f"{file} has a module in {brief(name)}, which is not the name of a directory beside it")
    return file.parent / name


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


def _dense(folder: Path, columns: int) -> Dense:
    """A linear layer over rows of `columns` numbers, with tensors linear.weight and optionally linear.bias."""
    fields = Fields.read(folder / "config.json")
    if (found := fields.integer("in_features")) != columns:
        raise ModelError(
            f"{fields.origin}: in_features is {found}, but {columns} numbers come there; download it again"
        )
    activation = fields.text("activation_function", _TANH)
    if activation not in _ACTIVATIONS:
        known = ", ".join(name.rpartition(".")[2] for name in _ACTIVATIONS)
        raise ModelError(f"{fields.origin}: activation_function {brief(activation)} is not supported; one of {known}")
    return Dense(
        fields.integer("out_features"),
        fields.flag("bias", True),
        _ACTIVATIONS[activation],
        source=f"{folder.name}.linear",
    )


def read_json(file: Path) -> object:
    """Raises ModelError."""
    try:
        return json.loads(read_file(file, _MOST_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{file} cannot be read as JSON ({error}); download it again") from None
