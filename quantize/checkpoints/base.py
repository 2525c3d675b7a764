"""What every reader of a quantized checkpoint makes: stored matrices, of the checkpoint's tensors."""

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
"""The numpy dtype that a tensor's bytes come in, by safetensors' dtype: bits where numpy has no such number."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a checkpoint. dtype: safetensors' name. load: a view of its bytes, of `shape` and dtype's carrier."""

    dtype: str
    shape: Shape
    load: Callable[[], NDArray[Any]]

    @classmethod
    def of(cls, array: NDArray[Any], dtype: str) -> StoredTensor:
        """The tensor of an array of dtype's carrier."""
        return cls(dtype, array.shape, lambda: array)

    @classmethod
    def in_buffer(cls, dtype: str, shape: Shape, buffer: bytes | mmap, begin: int) -> StoredTensor:
        """The tensor whose bytes begin at `begin` of a buffer, like a mapped file; nothing is read."""
        return cls(dtype, shape, lambda: np.ndarray(shape, CARRIERS[dtype], buffer, begin))


@dataclass(frozen=True)
class StoredFormat:
    """What the numbers of a stored matrix mean.

    kind: "int": value = (number - zero) * scale; otherwise numbers are codes: value = TABLES[kind][number] * scale.
    bits: 8 or 4. group_size: elements of a row that share a scale, or WHOLE_ROW; the last group may be short.
    asymmetric: each group has a zero point; otherwise it is the middle of the range, 8 or 128.
    scale_kind: what scales are stored in; others than "f32" come with their codes beside them.
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
    """How a checkpoint wants the inputs of a linear layer rounded.

    per: what shares a scale: the tensor, a token's row, or a group of it, as long as the weight's. scale, zero: of a
    static one; scale is what the numbers are multiplied by. symmetric: zero points are 0, also those of the moment. An
    NVFP4 one ("e2m1") may have a static scale above those of its groups.
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
    """activation: how the inputs of a layer are rounded, asked for when needed. tensors: what it reads, by role."""

    activation: Callable[[], Activation | None] = _not_rounded
    tensors: Mapping[str, str] = field(default_factory=dict)


NOT_ROUNDED = Inputs()


@dataclass(frozen=True)
class Rows:
    """Rows of a stored matrix, all in the order of its stored columns; read-only where they are views of the file.

    numbers: [R, K]. scale: [R, G]. zero: [R, G] of an asymmetric format. scale_codes: [R, G], the scales as they are
    stored, where the format's scale_kind is not "f32".
    """

    numbers: Bytes
    scale: Floats
    zero: Bytes | None = None
    scale_codes: Bytes | None = None


class StoredMatrix(ABC):
    """The weight [N, K] of a linear layer as a checkpoint stores it; read some rows at a time.

    name: the module's prefix. tensors: names of the checkpoint's tensors that it is made of, by what they are.
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
        """How the layer's input is to be rounded; None: not at all. Raises QuantizeError on a scale that none has."""
        return self._activation()

    @property
    def columns(self) -> NDArray[np.int32] | None:
        """Stored column j is column columns[j] of the weight, so that groups are neighbours; None: the same order."""
        return None

    @abstractmethod
    def _read(self, first: int, count: int) -> Rows:
        """Rows [first, first + count) as they are stored; `rows` checks and orders them."""

    def rows(self, first: int, count: int) -> Rows:
        """Rows [first, first + count). Raises QuantizeError on scales or zero points that no weight has."""
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
        """What rows [first, first + count) stand for, in the weight's own order of columns: exact, one rounding."""
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
        """Scales are finite; those of codes, which have a sign of their own, are not negative either."""
        wrong = ~np.isfinite(scale)
        if self.format.kind != "int":
            wrong |= scale < 0
        if wrong.any():
            raise QuantizeError(f"{self.tensors['scale']} holds the scale {scale[wrong][0]}; {AGAIN}")


def _widened(of_groups: Floats, size: int, k: int) -> Floats:
    """[R, K] of what groups of `size` columns share: [R, G]."""
    return np.repeat(of_groups, size, axis=1)[:, :k]


AGAIN = "download the checkpoint again"
"""What to do about a file that no tool writes."""
