"""The inputs with which a graph is examined: small, with known sizes, so that shape arithmetic can be evaluated."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from llmc.models.brief import brief, brief_name
from llmc.models.convert import Array
from llmc.models.errors import ModelError
from llmc.models.sources.onnx.file import DTYPES, OnnxFile

if TYPE_CHECKING:
    import onnx

TOKENS, TYPES, MASK, POSITION_IDS = "input_ids", "token_type_ids", "attention_mask", "position_ids"
_PAST = re.compile(r"past_key_values\.(\d+)\.(key|value)")
_FIRST_TOKEN = 5
"""Smaller ids are often padding or special, which some graphs treat differently."""


@dataclass(frozen=True)
class Probe:
    """`batch` texts with `past` cached tokens and `tokens` new ones. padded: the last text is one token shorter; the
    padding is in front if there is a cache, else at the end."""

    batch: int
    tokens: int
    past: int
    padded: bool

    @property
    def keys(self) -> int:
        return self.past + self.tokens

    def seen(self, causal: bool) -> Array:
        """bool [batch, keys]: which keys are not padding."""
        seen = np.ones((self.batch, self.keys), np.bool_)
        if self.padded:
            seen[-1, 0 if causal else -1] = False
        return seen


@dataclass(frozen=True)
class Inputs:
    """values: given inputs, by name. past: shapes of caches, by name. axes: their token axis. dtypes: of the caches."""

    probe: Probe
    has_past: bool
    values: dict[str, Array]
    past: dict[str, tuple[int, ...]] = field(default_factory=dict)
    axes: dict[str, int] = field(default_factory=dict)
    dtypes: dict[str, str] = field(default_factory=dict)


def has_past(file: OnnxFile) -> bool:
    return any(_PAST.fullmatch(value.name) for value in _inputs(file))


def past_name(name: str) -> tuple[int, str] | None:
    """(layer, "key" or "value") of a cache input; None for other names."""
    found = _PAST.fullmatch(name)
    return (int(found[1]), found[2]) if found else None


def probe_inputs(file: OnnxFile, probe: Probe) -> Inputs:
    """The inputs of the graph. Raises ModelError for an unknown one."""
    cached = has_past(file)
    if not cached:
        probe = Probe(probe.batch, probe.tokens, 0, probe.padded)
    seen = probe.seen(cached).astype(np.int64)
    count = probe.batch * probe.tokens
    ids = _FIRST_TOKEN + np.arange(count)[::-1]
    shape = (probe.batch, probe.tokens)
    known = {
        TOKENS: ids.reshape(shape).astype(np.int64),
        TYPES: np.zeros(shape, np.int64),
        MASK: seen,
        POSITION_IDS: np.maximum(np.cumsum(seen, -1) - 1, 0)[:, probe.past :],
    }
    found = Inputs(probe, cached, {})
    for value in _inputs(file):
        kind = value.type.tensor_type
        if value.name in known:
            dtype = DTYPES.get(kind.elem_type)
            if dtype is None or len(kind.shape.dim) not in (0, 2):
                raise ModelError(f"{file.path}: input {value.name} is not a matrix of numbers; export the model again")
            found.values[value.name] = known[value.name].astype(dtype)
        elif _PAST.fullmatch(value.name):
            found.past[value.name], found.axes[value.name] = _past_shape(file, value, probe)
            found.dtypes[value.name] = str(DTYPES.get(kind.elem_type, np.dtype(np.float32)))
        else:
            raise ModelError(_unknown(file, value.name))
    if TOKENS not in found.values:
        raise ModelError(f"{file.path} has no input {TOKENS}; llmc compiles models of text")
    return found


def fixed_tokens(file: OnnxFile) -> list[int] | None:
    """The shape of the tokens, if the graph is for no other number of them."""
    shapes = (value.type.tensor_type.shape.dim for value in _inputs(file) if value.name == TOKENS)
    sizes = [dim.dim_value for dim in next(shapes, ())]
    return sizes if len(sizes) == 2 and all(size > 0 for size in sizes) else None


def _inputs(file: OnnxFile) -> list[onnx.ValueInfoProto]:
    """Inputs without initializers, which older files also list."""
    return [value for value in file.model.graph.input if value.name not in file.initializers]


def _past_shape(file: OnnxFile, value: onnx.ValueInfoProto, probe: Probe) -> tuple[tuple[int, ...], int]:
    """([batch, heads, past, elements] in the graph's order, axis of the past): the second dynamic size is the past."""
    dims = [dim.dim_value for dim in value.type.tensor_type.shape.dim]
    free = [i for i, size in enumerate(dims) if size <= 0]
    if len(dims) != 4 or len(free) != 2 or free[0] != 0:
        raise ModelError(
            f"{file.path}: input {value.name} has the shape {brief([d or '?' for d in dims])}, not [batch, heads, "
            "past, elements], of which heads and elements are numbers"
        )
    dims[0], dims[free[1]] = probe.batch, probe.past
    return tuple(dims), free[1]


def _unknown(file: OnnxFile, name: str) -> str:
    known = ", ".join((TOKENS, MASK, POSITION_IDS, TYPES))
    if name == "use_cache_branch":
        return (
            f"{file.path} has two models in one (input {name}); export it again with a newer Optimum, which "
            "writes one, or give decoder_with_past_model.onnx"
        )
    return (
        f"{file.path} has an input {brief_name(name)}; llmc knows {known} and past_key_values.N.key and .value, as "
        "Optimum's exporter calls them"
    )
