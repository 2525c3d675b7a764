"""Quantized safetensors checkpoints: presents their matrices as the weights that weight maps name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from llmc.models.config import ModelConfig
from llmc.models.convert import Array, convert
from llmc.models.errors import ModelError
from llmc.models.registry import get_family
from llmc.models.sources.base import Checkpoint, Tensor
from llmc.models.sources.folder_checkpoint import FolderCheckpoint
from llmc.models.sources.stored import Stored
from llmc.models.weight_map import WeightMap
from llmc.quantize.checkpoints import StoredCheckpoint, StoredMatrix, find_stored
from llmc.quantize.formats.base import SCALE, WHOLE_ROW, Quantized, QuantizeError, WeightFormat
from llmc.quantize.formats.codes import E8M0, Codes
from llmc.quantize.formats.fp8 import Fp8
from llmc.quantize.formats.integers import ZERO, Integers

_WEIGHT = ".weight"
STACK = "_blocks"
"""Suffix of a tensor with the numbers of several matrices."""
_ROWS = 256  # rows dequantized at a time
_GROUP_UNIT, _FLOAT_GROUP_UNIT = 32, 16


def weight_format(matrix: StoredMatrix) -> WeightFormat | None:
    """The format that holds a matrix's numbers unchanged; None if there is none."""
    format = matrix.format
    unit = _GROUP_UNIT if format.kind == "int" else _FLOAT_GROUP_UNIT
    if format.group_size != WHOLE_ROW and format.group_size % unit:
        return None
    if format.kind == "int":
        return Integers(format.bits, format.group_size, format.asymmetric)
    if format.kind == "e4m3":
        return Fp8(format.group_size)
    powers = format.scale_kind == E8M0 and "overall" not in matrix.tensors
    return Codes(format.kind, format.group_size, E8M0 if powers else "f32")


class _StoredNumbers(Stored):
    def __init__(self, matrix: StoredMatrix, format: WeightFormat) -> None:
        self._matrix, self.format, self.columns = matrix, format, matrix.columns
        activation = matrix.activation
        self.int8_inputs = activation is not None and activation.kind == "int8" and format.sums is not None

    def read(self, first: int, out: Quantized) -> None:
        try:
            rows = self._matrix.rows(first, len(out.numbers))
        except QuantizeError as error:
            raise ModelError(str(error)) from None
        np.copyto(out.numbers, rows.numbers)
        scale = out.planes[SCALE]
        if scale.dtype == np.uint8:
            assert rows.scale_codes is not None
            np.copyto(scale, rows.scale_codes)
        else:
            np.copyto(scale, rows.scale)
        if rows.zero is not None:
            np.copyto(out.planes[ZERO], rows.zero)


class _MatrixTensor(Tensor):
    def __init__(self, matrix: StoredMatrix) -> None:
        self._matrix = matrix

    @property
    def shape(self) -> tuple[int, ...]:
        return self._matrix.shape

    @property
    def stored(self) -> Stored | None:
        format = weight_format(self._matrix)
        return None if format is None else _StoredNumbers(self._matrix, format)

    def read(self, first: int, out: Array) -> None:
        for at in range(0, len(out), _ROWS):
            some = out[at : at + _ROWS]
            try:
                values = self._matrix.values(first + at, len(some))
            except QuantizeError as error:
                raise ModelError(str(error)) from None
            convert(values, some)


class _StackedNumbers(Stored):
    def __init__(self, parts: Sequence[Stored], rows: int) -> None:
        self._parts, self._rows, self.format = parts, rows, parts[0].format

    def read(self, first: int, out: Quantized) -> None:
        for number, begin, places in _of_stack(self._rows, first, len(out.numbers)):
            self._parts[number].read(begin, out.rows(places))


class _StackTensor(Tensor):
    """Stacked matrices of one shape."""

    def __init__(self, matrices: Sequence[StoredMatrix]) -> None:
        self._matrices = [_MatrixTensor(matrix) for matrix in matrices]
        self._rows, self._columns = matrices[0].shape

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self._matrices) * self._rows, self._columns)

    @property
    def stored(self) -> Stored | None:
        found = [matrix.stored for matrix in self._matrices]
        parts = [part for part in found if part is not None]
        return _StackedNumbers(parts, self._rows) if len(parts) == len(found) else None

    def read(self, first: int, out: Array) -> None:
        for number, begin, places in _of_stack(self._rows, first, len(out)):
            self._matrices[number].read(begin, out[places])


def _of_stack(rows: int, first: int, count: int) -> Iterator[tuple[int, int, slice]]:
    """Splits rows [first, first + count) of stacked matrices: (matrix, first row in it, destination rows)."""
    at = 0
    while at < count:
        number, begin = divmod(first + at, rows)
        some = min(rows - begin, count - at)
        yield number, begin, slice(at, at + some)
        at += some


class QuantizedCheckpoint(Checkpoint):
    """A checkpoint in which `PREFIX.weight` stands for a quantized matrix; other tensors are unchanged.

    Stacks of matrices have the name of the tensor with their numbers.
    """

    config_name = "config.json"

    def __init__(self, plain: FolderCheckpoint, stored: StoredCheckpoint, unused: Iterable[str]) -> None:
        self.path, self._plain, self._stored = plain.path, plain, stored
        self._matrices = {f"{prefix}{_WEIGHT}": matrix for prefix, matrix in stored.matrices.items()}
        self._stacks = {f"{name}{STACK}": _StackTensor(stack) for name, stack in stored.experts.items()}
        hidden = {*stored.parts, *stored.unused, *unused}
        quantized = (*self._matrices, *self._stacks)
        self._names = tuple(sorted({*quantized, *(name for name in plain.names() if name not in hidden)}))

    def names(self) -> tuple[str, ...]:
        return self._names

    def shape(self, name: str) -> tuple[int, ...]:
        if name in self._stacks:
            return self._stacks[name].shape
        return self._matrices[name].shape if name in self._matrices else self._plain.shape(name)

    def dtype(self, name: str) -> str:
        quantized = name in self._matrices or name in self._stacks
        return self._stored.method if quantized else self._plain.dtype(name)

    def check_dtype(self, name: str) -> None:
        if name not in self._matrices and name not in self._stacks:
            self._plain.check_dtype(name)

    def tensor(self, name: str) -> Tensor:
        if name in self._stacks:
            return self._stacks[name]
        return _MatrixTensor(self._matrices[name]) if name in self._matrices else self._plain.tensor(name)

    def release(self) -> None:
        self._plain.release()

    def weight_map(self, config: ModelConfig) -> WeightMap:
        """Quantized matrices are those of linear layers, also where the family stores transposed ones."""
        shapes = {name: self.shape(name) for name in self._names}
        return get_family(config.model_type).weight_map_of(config, shapes, self._matrices)

    def kv_scales(self, kv_dtype: str, kv_heads: Mapping[int, int]) -> list[Array] | None:
        stated = self._stored.kv_scales
        if stated is None or stated.dtype != kv_dtype:
            return None
        try:
            return list(stated.read(kv_heads))
        except QuantizeError as error:
            raise ModelError(f"{self.path}: {error}") from None

    def notes(self) -> tuple[str, ...]:
        """Sentences on layer inputs that are rounded differently from what the checkpoint requests."""
        wanted: Counter[str] = Counter()
        for matrix in self._matrices.values():
            activation = matrix.activation
            if activation is None or (activation.kind, activation.per, activation.dynamic) == ("int8", "token", True):
                continue
            how = f"{'dynamic' if activation.dynamic else 'static'} scale a {activation.per}"
            wanted[f"{activation.kind} with one {how}"] += 1
        said = []
        for kind, count in sorted(wanted.items()):
            instead = "int8 with a scale a token" if kind.startswith("int8") else "not at all"
            said.append(f"the inputs of {count} layers are to be rounded to {kind}: they are rounded {instead}")
        return tuple(said)


def open_quantized(
    path: Path,
    config: Mapping[str, Any],
    other: Mapping[str, Any] | None,
    linears: Iterable[str],
    known: Container[str],
) -> QuantizedCheckpoint:
    """config, other: config.json, and hf_quant_config.json if there is one. linears: prefixes of the model's linear
    layers. known: names of its tensors. Raises ModelError."""
    plain = FolderCheckpoint(path)
    tensors = plain.stored_tensors()
    try:
        stored = find_stored(config, tensors, linears, other)
        if stored is None:
            raise ModelError(f"{path}: config.json says nothing of quantization any more; try again")
        return QuantizedCheckpoint(plain, stored, stored.empty_biases(tensors, known))
    except QuantizeError as error:
        raise ModelError(f"{path}: {error}") from None
