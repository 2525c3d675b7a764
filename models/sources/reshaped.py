"""Tensors that the model needs in another shape, or as a function of the stored values."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import numpy as np

from llmc.models.convert import Array, convert
from llmc.models.sources.base import ArrayTensor, Tensor
from llmc.models.sources.reordered import Readable
from llmc.models.weight_map import HeadPart


def _whole(tensor: Tensor) -> Array:
    """The whole tensor: in its dtype if it is in memory, else f32."""
    return tensor.array if isinstance(tensor, ArrayTensor) else _values(tensor)


@lru_cache(maxsize=4)
def _values(tensor: Tensor) -> Array:
    """The whole tensor in f32, cached because later rows are scattered over the file."""
    out = np.empty(tensor.shape, np.float32)
    tensor.read(0, out)
    return out


@lru_cache(maxsize=16)
def _matrix(stack: Tensor, index: int) -> Array:
    """One of the matrices [count, rows, columns]: in their dtype if in memory, else f32."""
    if isinstance(stack, ArrayTensor):
        found: Array = stack.array[index]
        return found
    out: Array = np.empty(stack.shape[1:], np.float32)
    stack.read(index, out[None])
    return out


class Transposed(Tensor):
    """A matrix stored as [columns, rows]."""

    def __init__(self, stored: Tensor) -> None:
        self._stored = stored

    @property
    def shape(self) -> tuple[int, ...]:
        return self._stored.shape[::-1]

    def read(self, first: int, out: Array) -> None:
        convert(_whole(self._stored)[:, first : first + len(out)].T, out)


class Flattened(Tensor):
    """A matrix as one vector, row by row."""

    def __init__(self, matrix: Tensor) -> None:
        self._matrix = matrix

    @property
    def shape(self) -> tuple[int, ...]:
        rows, columns = self._matrix.shape
        return (rows * columns,)

    def read(self, first: int, out: Array) -> None:
        convert(_whole(self._matrix).reshape(-1)[first : first + len(out)], out)


class Parted(Tensor):
    """Stacked matrices seen as [count, rows, columns]."""

    def __init__(self, joined: Tensor, count: int) -> None:
        self._joined, self._count = joined, count

    @property
    def shape(self) -> tuple[int, ...]:
        rows, columns = self._joined.shape
        return (self._count, rows // self._count, columns)

    def read(self, first: int, out: Array) -> None:
        count, rows, columns = out.shape
        self._joined.read(first * rows, out.reshape(count * rows, columns))


class Stacked(Tensor):
    """Matrices [count, rows, columns], stacked. turned: stored as [count, columns, rows]."""

    def __init__(self, matrices: Tensor, *, turned: bool = False) -> None:
        self._matrices, self._turned = matrices, turned
        count, rows, columns = matrices.shape
        self._count, self._rows, self._columns = (count, columns, rows) if turned else (count, rows, columns)

    @property
    def shape(self) -> tuple[int, ...]:
        return (self._count * self._rows, self._columns)

    def read(self, first: int, out: Array) -> None:
        rows, at = self._rows, 0
        while at < len(out):
            number, begin = divmod(first + at, rows)
            some, matrix = out[at : at + rows - begin], _matrix(self._matrices, number)
            convert((matrix.T if self._turned else matrix)[begin : begin + len(some)], some)
            at += len(some)


class Shifted(Tensor):
    """A float32 tensor plus a constant."""

    def __init__(self, whole: Readable, plus: float) -> None:
        self._whole, self._plus = whole, np.float32(plus)

    @property
    def shape(self) -> tuple[int, ...]:
        return self._whole.shape

    def read(self, first: int, out: Array) -> None:
        self._whole.read(first, out)
        out += self._plus


class Mapped(Tensor):
    """A function of each row of a tensor, computed in float32."""

    def __init__(self, whole: Readable, of_rows: Callable[[Array], Array]) -> None:
        self._whole, self._of_rows = whole, of_rows

    @property
    def shape(self) -> tuple[int, ...]:
        return self._whole.shape

    def read(self, first: int, out: Array) -> None:
        rows = np.empty(out.shape, np.float32)
        self._whole.read(first, rows)
        convert(self._of_rows(rows), out)


class OfHeads(Tensor):
    """The `HeadPart` of each head of a matrix, as floats."""

    def __init__(self, whole: Readable, part: HeadPart) -> None:
        self._whole, self._part = whole, part
        self._kept: tuple[int, Array] = (-1, np.empty((0, 0), np.float32))

    @property
    def shape(self) -> tuple[int, ...]:
        return self._part.shape_of(self._whole.shape)

    def read(self, first: int, out: Array) -> None:
        part, columns, at = self._part, self._whole.shape[1], 0
        of_head = columns if part.turned else part.count
        while at < len(out):
            head, begin = divmod(first + at, of_head)
            some = out[at : at + of_head - begin]
            found = self._head(head)
            convert((found.T if part.turned else found)[begin : begin + len(some)], some)
            at += len(some)

    def _head(self, head: int) -> Array:
        """The part of one head in f32, cached for the next rows."""
        kept, found = self._kept
        if kept != head:
            found = np.empty((self._part.count, self._whole.shape[1]), np.float32)
            self._whole.read(head * self._part.rows + self._part.first, found)
            self._kept = head, found
        return found
