"""LoRA adapters as PEFT writes them: adapter_config.json, and adapter_model.safetensors or adapter_model.bin beside it.

Hu et al., arXiv 2106.09685: a linear's weight W [N, K] becomes W + scale · B A, with A [r, K] and B [N, r]. DoRA (Liu
et al., arXiv 2402.09353) then rescales each row to a learned length.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from llmc.models.brief import brief, brief_name
from llmc.models.convert import Array, convert
from llmc.models.errors import ModelError
from llmc.models.fields import Fields
from llmc.models.files import has_file
from llmc.models.sources.base import Tensor
from llmc.models.sources.safetensors import SafetensorsFile
from llmc.models.sources.tensor_file import TensorFile
from llmc.models.sources.torch_file import TorchFile
from llmc.peft_experts import Parameter, parameter_names
from llmc.peft_format import (
    BASE_WEIGHT,
    CONFIG,
    EMBEDDING_PART,
    OTHER_BASES,
    PARAMETERS,
    PARTS,
    PREFIX,
    TORCH_WEIGHTS,
    WEIGHTS,
    PatternError,
    pattern_of,
    scale_of,
    split_name,
    unknown_setting,
)


@dataclass(frozen=True)
class LowRank:
    """The low-rank change of one matrix of the model.

    a: [r, columns]. b: [rows, r]. Both lie in the adapter's file until read. scale: of their product. length: DoRA's
    row lengths, [rows]. turned: whether the product is transposed before it is added.
    """

    a: Array
    b: Array
    scale: float
    length: Array | None = None
    turned: bool = False

    @property
    def rank(self) -> int:
        return len(self.a)

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = len(self.b), self.a.shape[1]
        return (columns, rows) if self.turned else (rows, columns)

    def rows(self, first: int, count: int) -> NDArray[np.float64]:
        """Rows [first, first + count) of the product, in the model's orientation."""
        some = slice(first, first + count)
        # Row-major, however the file has them: the rounding of a product depends on it.
        if self.turned:
            return self.scale * (_wide(self.a[:, some]).T @ _wide(self.b).T)
        return self.scale * (_wide(self.b[some]) @ _wide(self.a))


@dataclass(frozen=True)
class LoraAdapter:
    """file: of its tensors. low_rank: changes, by weight name. parameters: changes of parameters, of experts above all.
    scale_of: of such a change, by the parameter's full name and the rank; raises ModelError. whole: tensors that
    replace the model's. bases: the model's own matrices that it was trained on, as PEFT saves those of embeddings.
    Names are those of the trained class; a checkpoint may omit their prefix. release: see `Checkpoint.release`."""

    file: Path
    low_rank: Mapping[str, LowRank]
    parameters: tuple[Parameter, ...]
    scale_of: Callable[[str, int], float]
    whole: Mapping[str, Tensor]
    bases: Mapping[str, Tensor]
    release: Callable[[], None]

    @classmethod
    def read(cls, path: Path) -> LoraAdapter:
        """Reads an adapter. Raises ModelError if it is not a LoRA adapter, or of a kind that cannot be merged."""
        if not has_file(path / CONFIG):
            raise ModelError(f"{path} has no {CONFIG}; give the directory of a LoRA adapter as PEFT saves it")
        config = Fields.read(path / CONFIG)
        _check_kind(config)
        file = weights_file(path)
        if not has_file(file):
            raise ModelError(
                f"{path} has no {WEIGHTS} or {TORCH_WEIGHTS}; save the adapter with PEFT's save_pretrained"
            )
        return _read(file, config)


def weights_file(path: Path) -> Path:
    """The file of an adapter's tensors: safetensors unless there is only a file of torch."""
    return path / (TORCH_WEIGHTS if has_file(path / TORCH_WEIGHTS) and not has_file(path / WEIGHTS) else WEIGHTS)


@dataclass
class _Found:
    parts: dict[str, Array] = field(default_factory=dict)
    is_embedding: bool = False


def _read(file: Path, config: Fields) -> LoraAdapter:
    tensors: TensorFile = TorchFile(file) if file.name == TORCH_WEIGHTS else SafetensorsFile(file)
    found: dict[str, _Found] = {}
    whole: dict[str, Tensor] = {}
    bases: dict[str, Tensor] = {}
    for full in sorted(tensors.entries):
        tensor = tensors.load(full)
        if not full.startswith(PREFIX):
            raise ModelError(f"{file}: tensor {brief_name(full)} does not begin with {PREFIX}, as PEFT's do")
        name = full.removeprefix(PREFIX)
        split = split_name(name)
        if split is None and ".lora_" in name:
            raise ModelError(f"{file}: tensor {brief_name(full)} is a part of LoRA that llmc does not know")
        if name.endswith(BASE_WEIGHT):
            bases[f"{name.removesuffix(BASE_WEIGHT)}.weight"] = tensor
            continue
        if split is None:
            whole[name.replace(".modules_to_save.", ".").replace(".base_layer.", ".")] = tensor
            continue
        module_name, end = split
        module = found.setdefault(module_name, _Found())
        module.parts[PARTS[end]] = tensor.array
        module.is_embedding |= end.startswith(EMBEDDING_PART)
    changes: dict[str, LowRank] = {}
    parameters: list[Parameter] = []
    targets = config.raw(PARAMETERS, None) or []
    if not isinstance(targets, list) or not all(isinstance(target, str) for target in targets):
        raise ModelError(f"{config.origin}: {PARAMETERS} is {brief(targets)}, which is no list of names")
    for module_name, one in found.items():
        _check_values(file, module_name, one)
        key, named = f"{module_name}.weight", parameter_names(targets, module_name)
        if named is None:
            changes[key] = _change(file, config, module_name, module_name, one)
        elif (plain := named.plain(one.parts["a"], partial(_rank, config))) is not None:
            changes[plain] = _change(file, config, module_name, plain, one)
        elif "length" in one.parts:
            raise ModelError(
                f"{file}: {brief_name(module_name)} has lengths of DoRA, which no experts of one tensor have"
            )
        else:
            parameters.append(Parameter(named.module, one.parts["a"], one.parts["b"], named.names))
        tensors.release()  # what was checked is read again when it is merged
    if not changes and not parameters and not whole:
        raise ModelError(f"{file} has no tensors, so there is nothing to merge")

    def scale(parameter: str, rank: int) -> float:
        return _scale(file, config, parameter, rank)

    return LoraAdapter(file, changes, tuple(parameters), scale, whole, bases, tensors.release)


def _check_values(file: Path, module: str, found: _Found) -> None:
    where = f"{file}: {brief_name(module)}"
    if not {"a", "b"} <= found.parts.keys():
        raise ModelError(f"{where} has one of lora_A and lora_B and not the other; save the adapter again")
    if not all(np.isfinite(part).all() for part in found.parts.values()):
        raise ModelError(f"{where} holds values that are infinite or not numbers; save the adapter again")


def _rank(config: Fields, name: str) -> int:
    return int(_of_module(config, "rank_pattern", name, config.integer("r")))


def _scale(file: Path, config: Fields, name: str, found: int) -> float:
    """The factor on the products of what is called `name` and has matrices of rank `found`."""
    rank = _rank(config, name)
    alpha = float(_of_module(config, "alpha_pattern", name, config.number("lora_alpha", positive=False)))
    if rank != found or rank == 0:
        raise ModelError(
            f"{file}: {brief_name(name)} has rank {found} where {CONFIG} says {rank}; save the adapter again"
        )
    return scale_of(alpha, rank, rank_stabilised=config.flag("use_rslora", False))


def _change(file: Path, config: Fields, module: str, name: str, found: _Found) -> LowRank:
    """The change of a module's matrix. name: by which patterns choose its rank and scale."""
    where = f"{file}: {brief_name(module)}"
    a, b, length = found.parts["a"], found.parts["b"], found.parts.get("length")
    if a.ndim != 2 or b.ndim != 2 or len(a) != b.shape[1]:
        raise ModelError(f"{where} has lora_A of shape {list(a.shape)} and lora_B of {list(b.shape)}, which do not fit")
    if length is not None and length.size != len(b) and not found.is_embedding:
        raise ModelError(f"{where} has {length.size} lengths of DoRA for {len(b)} rows; save the adapter again")
    return LowRank(a, b, _scale(file, config, name, len(a)), length, turned=found.is_embedding)


def _wide(part: Array) -> NDArray[np.float64]:
    """A row-major copy in double precision."""
    return np.ascontiguousarray(part, np.float64)


def _of_module(config: Fields, name: str, module: str, default: float) -> float:
    """The number for the first pattern that matches the end of a module's name, as PEFT does."""
    patterns = config.table(name)
    if patterns is None:
        return default
    try:
        key = pattern_of(patterns.values, module)
    except PatternError as error:
        raise ModelError(
            f"{config.origin}: {name} has {brief(error.pattern)}, which is not a pattern ({error})"
        ) from None
    return default if key is None else patterns.number(key, positive=False)


def _check_kind(config: Fields) -> None:
    kind = config.text("peft_type")
    if kind != "LORA":
        raise ModelError(f"{config.origin}: peft_type is {brief(kind)}; llmc merges only LORA adapters")
    start = config.raw("init_lora_weights", True)
    if isinstance(start, str) and start.lower().startswith(OTHER_BASES):
        raise ModelError(
            f"{config.origin}: init_lora_weights is {brief(start)}, which changes the model under the adapter too; "
            "convert it to a plain LoRA with PEFT's path_initial_model_for_weight_conversion"
        )
    if (name := unknown_setting(config.values)) is not None:
        raise ModelError(
            f"{config.origin}: {brief_name(name)} is {brief(config.raw(name))}, which llmc does not know of LoRA "
            "adapters; take it out if it does not change what the adapter computes"
        )


class Merged(Tensor):
    """A matrix plus low-rank changes, in float32.

    Rows are computed in fixed runs: the rounding of matrix products depends on which rows are computed together.
    """

    _ROWS = 64

    def __init__(self, base: Tensor, changes: tuple[LowRank, ...]) -> None:
        self._base, self._changes = base, changes

    @property
    def shape(self) -> tuple[int, ...]:
        return self._base.shape

    def read(self, first: int, out: Array) -> None:
        end, rows = first + len(out), self._ROWS
        for at in range(first - first % rows, end, rows):
            found = self._block(at, min(rows, self.shape[0] - at))
            begin, stop = max(at, first), min(at + rows, end)
            convert(found[begin - at : stop - at], out[begin - first : stop - first])

    def _block(self, first: int, count: int) -> Array:
        base = np.empty((count, self.shape[1]), np.float32)
        self._base.read(first, base)
        total = base.astype(np.float64)
        for change in self._changes:
            total += change.rows(first, count)
            if change.length is not None:
                lengths = _wide(change.length[first : first + count])
                total *= (lengths / np.linalg.norm(total, axis=1))[:, None]
        return total.astype(np.float32)
