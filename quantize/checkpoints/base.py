"""Common to all readers of quantized checkpoints: turns a checkpoint's tensors into stored matrices."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from mmap import mmap
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from llmc.quantize.checkpoints.floats import TABLES
from llmc.quantize.formats.base import WHOLE_ROW, QuantizeError

Shape = tuple[int, ...]
Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]
Kind = Literal["int", "e4m3", "e2m1", "nf4", "fp4"]
ScaleKind = Literal["f32", "e4m3", "e8m0"]

CARRIERS: dict[str, np.dtype[Any]] = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
    "F8_E4M3": np.dtype("u1"),
    "F8_E8M0": np.dtype("u1"),
    "I8": np.dtype("i1"),
    "U8": np.dtype("u1"),
    "I16": np.dtype("<i2"),
    "I32": np.dtype("<i4"),
    "I64": np.dtype("<i8"),
}
"""The numpy dtype that carries a tensor's bytes, by safetensors dtype: a same-width integer where numpy lacks the
type."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a checkpoint.

    dtype: safetensors' name.
    load: returns a view of the bytes, with `shape` and the carrier dtype of CARRIERS.
    """

    dtype: str
    shape: Shape
    load: Callable[[], NDArray[Any]]

    @classmethod
    def of(cls, array: NDArray[Any], dtype: str) -> StoredTensor:
        """The tensor that holds `array`, whose safetensors dtype is `dtype`."""
        return cls(dtype, array.shape, lambda: array)

    @classmethod
    def in_buffer(cls, dtype: str, shape: Shape, buffer: bytes | mmap, begin: int) -> StoredTensor:
        """The tensor at byte offset `begin` of a buffer such as a mapped file; nothing is read yet."""
        return cls(dtype, shape, lambda: np.ndarray(shape, CARRIERS[dtype], buffer, begin))


@dataclass(frozen=True)
class StoredFormat:
    """How to turn the numbers of a stored matrix into values.

    kind: "int" means value = (number - zero) * scale; any other kind means value = TABLES[kind][number] * scale. bits:
    8 or 4. group_size: elements of a row that share a scale, or WHOLE_ROW; the last group may be short. asymmetric:
    each group has a zero point; otherwise it is the middle of the range, 8 or 128.
    scale_kind: how scales are stored; kinds other than "f32" also provide the stored codes.
    """

    kind: Kind
    bits: int
    group_size: int
    asymmetric: bool = False
    scale_kind: ScaleKind = "f32"

    def groups(self, k: int) -> int:
        """Groups of a row of `k` elements."""
        return 1 if self.group_size == WHOLE_ROW else -(-k // self.group_size)


@dataclass(frozen=True)
class Activation:
    """How a checkpoint rounds the inputs of a linear layer.

    per: what shares a scale: the whole tensor, a token's row, or a group of a row (as long as the weight's groups).
    scale, zero: of a static rounding. Numbers are multiplied by scale to get values.
    symmetric: zero points are 0, dynamic ones too.
    An NVFP4 activation ("e2m1") may have a static scale on top of its group scales.
    """

    kind: Literal["int8", "int4", "e4m3", "e2m1"]
    per: Literal["tensor", "token", "group"]
    dynamic: bool
    scale: float | None = None
    zero: int | None = None
    symmetric: bool = True


def _not_rounded() -> None:
    return None


@dataclass(frozen=True)
class Inputs:
    """activation: computes how a layer's inputs are rounded, on demand. tensors: those it reads, by role."""

    activation: Callable[[], Activation | None] = _not_rounded
    tensors: Mapping[str, str] = field(default_factory=dict)


NOT_ROUNDED = Inputs()


@dataclass(frozen=True)
class Rows:
    """Rows of a stored matrix, with columns in the order of `StoredMatrix.columns`. Arrays that view the file are
    read-only.

    numbers: [R, K]. scale: [R, G]. zero: [R, G] for an asymmetric format. scale_codes: [R, G], the scales as stored,
    for a scale_kind other than "f32".
    """

    numbers: Bytes
    scale: Floats
    zero: Bytes | None = None
    scale_codes: Bytes | None = None


class StoredMatrix(ABC):
    """The weight [N, K] of a linear layer as a checkpoint stores it; read in runs of rows.

    name: the module's prefix. tensors: role → name, for the checkpoint tensors that form the matrix.
    """

    def __init__(
        self,
        name: str,
        shape: tuple[int, int],
        format: StoredFormat,
        tensors: Mapping[str, str],
        inputs: Inputs = NOT_ROUNDED,
    ) -> None:
        self.name = name
        self.shape = shape
        self.format = format
        self.tensors = {**tensors, **inputs.tensors}
        self._activation = inputs.activation

    @cached_property
    def activation(self) -> Activation | None:
        """How the layer's input is rounded; None if it is not. Raises QuantizeError on an invalid scale."""
        return self._activation()

    @property
    def columns(self) -> NDArray[np.int32] | None:
        """The column order that makes groups contiguous: column j of `rows` is column columns[j] of the weight. None:
        the same order."""
        return None

    @abstractmethod
    def _read(self, first: int, count: int) -> Rows:
        """Rows [first, first + count) as the file has them; `rows` checks them and orders their columns."""

    def rows(self, first: int, count: int) -> Rows:
        """Rows [first, first + count), columns ordered by `columns`. Raises QuantizeError on invalid scales or zero
        points."""
        if first < 0 or count < 0 or first + count > self.shape[0]:
            raise IndexError(f"rows {first} to {first + count} of {self.shape[0]} of {self.name}")
        read = self._read(first, count)
        self._check_scale(read.scale)
        if self.format.kind == "e4m3" and ((read.numbers & 127) == 127).any():
            raise QuantizeError(f"{self.tensors['weight']} holds a NaN; {AGAIN}")
        columns = self.columns
        if columns is None:
            return read
        return Rows(np.take(read.numbers, columns, axis=1), read.scale, read.zero, read.scale_codes)

    def values(self, first: int, count: int) -> Floats:
        """The values of rows [first, first + count), in the weight's column order: exact, then rounded once."""
        rows = self.rows(first, count)
        k = self.shape[1]
        size = k if self.format.group_size == WHOLE_ROW else min(k, self.format.group_size)
        if self.format.kind == "int":
            values = rows.numbers.astype(np.float32)
            middle = np.float32(1 << (self.format.bits - 1))
            values -= middle if rows.zero is None else _widened(rows.zero.astype(np.float32), size, k)
        else:
            values = np.take(TABLES[self.format.kind], rows.numbers)
        values *= _widened(rows.scale, size, k)
        columns = self.columns
        if columns is None:
            return values
        return np.take(values, np.argsort(columns), axis=1)

    def _check_scale(self, scale: Floats) -> None:
        """Raises QuantizeError unless scales are finite; for signed codes they must also not be negative."""
        wrong = ~np.isfinite(scale)
        if self.format.kind != "int":
            wrong |= scale < 0
        if wrong.any():
            raise QuantizeError(f"{self.tensors['scale']} holds the scale {scale[wrong][0]}; {AGAIN}")


def _widened(of_groups: Floats, size: int, k: int) -> Floats:
    """Expands values of column groups, [R, G], to all columns, [R, K]."""
    return np.repeat(of_groups, size, axis=1)[:, :k]


AGAIN = "download the checkpoint again"
"""Advice for a file that no tool would write."""
