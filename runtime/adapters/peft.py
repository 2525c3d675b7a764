"""A LoRA adapter as PEFT saves it: adapter_config.json, and adapter_model.safetensors beside it. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from llmc.peft_experts import ExpertsChange, ExpertsError, Matrices, Parameter, changes_of, parameter_names
from llmc.peft_format import (
    BASE_WEIGHT,
    CONFIG,
    OTHER_BASES,
    PARAMETERS,
    PARTS,
    PREFIX,
    TORCH_WEIGHTS,
    WEIGHTS,
    PatternError,
    is_unread,
    pattern_of,
    scale_of,
    split_name,
    unknown_setting,
)
from llmc.regular_file import JsonError, parse_json, read_regular
from llmc.shown import shown

from .tensors import AdapterError, Array, read_tensors

_MAX_CONFIG_BYTES = 1 << 20
_MERGE = "merge the adapter when you compile, with --merge-lora"
_AS_SAVED = "give the directory of a LoRA adapter as PEFT's save_pretrained writes it"


class NoAdapterError(AdapterError):
    """There is no adapter at the path."""


@dataclass(frozen=True)
class LowRank:
    """A module's change, scale · b a. a: float32 [rank, inputs], of an embedding [rank, tokens]. b: [outputs, rank]."""

    a: Array
    b: Array
    scale: float

    @property
    def rank(self) -> int:
        return len(self.a)


@dataclass(frozen=True)
class Changes:
    """layers: by module name in the model that the adapter was trained on. experts: of weights of experts, with the
    scale of their products."""

    layers: dict[str, LowRank]
    experts: list[tuple[ExpertsChange, float]]

    @property
    def rank(self) -> int:
        """The largest."""
        return max((*(one.rank for one in self.layers.values()), *(one.rank for one, _ in self.experts)))


def read_adapter(path: Path, experts: Mapping[str, Sequence[Matrices]], unread: Sequence[str] = ()) -> Changes:
    """The changes of an adapter. experts: what the model's layers have, as `changes_of` takes it. unread: prefixes of
    parts of the model that the artifact has not, whose changes are left out.

    Raises NoAdapterError if there is none, and AdapterError if it is damaged, or of a kind that can only be merged.
    """
    config = _config(path)
    _check_kind(path / CONFIG, config)
    if not (path / WEIGHTS).exists():
        if (path / TORCH_WEIGHTS).exists():
            raise AdapterError(
                f"{path} has {TORCH_WEIGHTS} and no {WEIGHTS}, which alone is loaded while the model runs; save the "
                "adapter with a newer PEFT, or merge it when you compile, with --merge-lora"
            )
        raise NoAdapterError(f"{path} has no {WEIGHTS}; {_AS_SAVED}")
    found: dict[str, dict[str, Array]] = {}
    for module, part, values in _parts(path / WEIGHTS, unread):
        found.setdefault(module, {})[part] = values
    if not found:
        of_text = " of parts that read text" if unread else ""
        raise AdapterError(f"{path / WEIGHTS} has no tensors{of_text}, so there is nothing to load")
    targets = config.get(PARAMETERS) or []
    if not isinstance(targets, list) or not all(isinstance(target, str) for target in targets):
        raise AdapterError(f"{path / CONFIG}: {PARAMETERS} is {shown(targets)}, which is no list of names")
    layers, parameters = dict[str, LowRank](), list[Parameter]()
    for module, parts in found.items():
        a, b = _pair(path, module, parts)
        if (named := parameter_names(targets, module)) is None:
            layers[module] = _low_rank(path, config, module, module, a, b)
        elif (plain := named.plain(a, partial(_rank, path, config))) is not None:
            layers[plain.removesuffix(".weight")] = _low_rank(path, config, module, plain, a, b)
        else:
            parameters.append(Parameter(named.module, a, b, named.names))
    try:
        changes = changes_of(parameters, experts)
    except ExpertsError as error:
        other_way = "" if experts else "compile the model with --lora-experts, or "
        raise AdapterError(f"{path / WEIGHTS}: {error}; {error.advice or other_way + _MERGE}") from None
    return Changes(layers, [(one, _scale(path, config, one.parameter, one.rank)) for one in changes])


def _config(path: Path) -> Mapping[str, Any]:
    file = path / CONFIG
    try:
        config = parse_json(read_regular(file, _MAX_CONFIG_BYTES))
    except (FileNotFoundError, NotADirectoryError):
        raise NoAdapterError(f"{path} has no {CONFIG}; {_AS_SAVED}") from None
    except OSError as error:
        raise AdapterError(f"cannot read {file}: {error.strerror or error}") from None
    except ValueError as error:
        why = error if isinstance(error, JsonError) else "no JSON"
        raise AdapterError(f"{file} is not valid JSON ({why}); save the adapter again") from None
    if not isinstance(config, dict):
        raise AdapterError(f"{file} is not a JSON object; save the adapter again")
    return config


def _check_kind(file: Path, config: Mapping[str, Any]) -> None:
    kind = config.get("peft_type")
    if kind != "LORA":
        raise AdapterError(f"{file}: peft_type is {shown(kind)}; llmc loads only LORA adapters")
    start = config.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(OTHER_BASES):
        raise AdapterError(
            f"{file}: init_lora_weights is {shown(start)}, which changes the model under the adapter too; convert it "
            "to a plain LoRA with PEFT"
        )
    if config.get("use_dora"):
        raise AdapterError(f"{file}: use_dora is True, which cannot be loaded while the model runs; {_MERGE}")
    if (name := unknown_setting(config)) is not None:
        raise AdapterError(
            f"{file}: {shown(name)} is {shown(config[name])}, which llmc does not know of LoRA adapters; take it out "
            "if it does not change what the adapter computes"
        )


def _parts(file: Path, unread: Sequence[str]) -> Iterator[tuple[str, str, Array]]:
    """(module, "a" or "b", values) of each tensor of a part that the artifact has."""

    def skip(name: str) -> bool:
        return _is_base_weight(name) or (name.startswith(PREFIX) and is_unread(name.removeprefix(PREFIX), unread))

    for full, values in read_tensors(file, skip):
        if not full.startswith(PREFIX):
            raise AdapterError(f"{file}: tensor {shown(full)} does not begin with {PREFIX}, as PEFT's do")
        split = split_name(full.removeprefix(PREFIX))
        if split is None and ".lora_" in full:
            raise AdapterError(f"{file}: tensor {shown(full)} is a part of LoRA that llmc does not know")
        if split is None or PARTS[split[1]] not in ("a", "b"):
            raise AdapterError(
                f"{file}: tensor {shown(full)} is more than LoRA of a layer, which cannot be loaded while the "
                "model runs; merge the adapter when you compile, with --merge-lora"
            )
        if not np.isfinite(values).all():
            raise AdapterError(f"{file}: {shown(full)} holds values that are infinite or not numbers")
        yield split[0], PARTS[split[1]], values


def _is_base_weight(name: str) -> bool:
    """Whether the model has the tensor already: what trains an adapter leaves it as it is. It may be a GB."""
    return name.startswith(PREFIX) and name.endswith(BASE_WEIGHT)


def _pair(path: Path, module: str, parts: Mapping[str, Array]) -> tuple[Array, Array]:
    a, b = parts.get("a"), parts.get("b")
    if a is None or b is None:
        raise AdapterError(
            f"{path / WEIGHTS}: {shown(module)} has one of lora_A and lora_B and not the other; save the adapter again"
        )
    return a, b


def _low_rank(path: Path, config: Mapping[str, Any], module: str, name: str, a: Array, b: Array) -> LowRank:
    """name: by which patterns choose rank and scale."""
    if a.ndim != 2 or b.ndim != 2 or len(a) != b.shape[1] or len(a) == 0:
        raise AdapterError(
            f"{path / WEIGHTS}: {shown(module)} has lora_A of {list(a.shape)} and lora_B of {list(b.shape)}, which do "
            "not fit"
        )
    return LowRank(a, b, _scale(path, config, name, len(a)))


def _rank(path: Path, config: Mapping[str, Any], name: str) -> float:
    return _number(path / CONFIG, config, "rank_pattern", name, "r")


def _scale(path: Path, config: Mapping[str, Any], name: str, found: int) -> float:
    """The factor on the product of matrices of rank `found`."""
    rank = _rank(path, config, name)
    alpha = _number(path / CONFIG, config, "alpha_pattern", name, "lora_alpha")
    if rank != found:
        raise AdapterError(
            f"{path / WEIGHTS}: {shown(name)} has rank {found} where {CONFIG} says {rank:g}; save the adapter again"
        )
    return scale_of(alpha, found, rank_stabilised=bool(config.get("use_rslora")))


def _number(file: Path, config: Mapping[str, Any], patterns: str, module: str, default: str) -> float:
    """A module's number: from the first matching pattern, else the common one."""
    table = config.get(patterns) or {}
    if not isinstance(table, dict):
        raise AdapterError(f"{file}: {patterns} is {shown(table)}, which is not a JSON object")
    try:
        key = pattern_of(table, module)
    except PatternError as error:
        raise AdapterError(f"{file}: {patterns} has {shown(error.pattern)}, which is not a pattern ({error})") from None
    value = config.get(default) if key is None else table[key]
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise AdapterError(f"{file}: {default if key is None else patterns} is {shown(value)}, which is not a number")
    return float(value)
