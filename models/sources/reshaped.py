"""Tensors that the model needs in another shape, or as a function of the stored values."""

from __future__ import annotations

import threading
from collections.abc import Callable
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmc.models.convert import DTYPES, Array, convert
from llmc.models.sources.base import ArrayTensor, Tensor
from llmc.models.sources.reordered import Readable
from llmc.models.weight_map import HeadPart


class _Held(threading.local):
    """The last matrix of which a thread read scattered elements. A thread reads one weight after another, so one is
    enough: what a compilation holds does not grow with the model."""

    def __init__(self) -> None:
        self._of: tuple[Tensor, int | None] | None = None
        self._values: Array = np.empty((0, 0), np.float32)

    def matrix(self, tensor: Tensor, index: int | None, dtype: np.dtype[Any]) -> Array:
        """The tensor, or matrix `index` of [count, rows, columns], in `dtype` or in f32, which makes the same `dtype`.

        Arrays are returned as they are.
        """
        if isinstance(tensor, ArrayTensor):
            found: Array = tensor.array if index is None else tensor.array[index]
            return found
        if self._of != (tensor, index) or self._values.dtype not in (dtype, DTYPES["f32"]):
            self._of = None
            self._values = np.empty(0, dtype)  # frees the former one first
            values = np.empty(tensor.shape if index is None else tensor.shape[1:], dtype)
            if index is None:
                tensor.read(0, values)
            else:
                tensor.read(index, values[None])
            self._of, self._values = (tensor, index), values
        return self._values


_held = _Held()


class Transposed(Tensor):
    """A matrix stored as [columns, rows]."""

    def __init__(self, stored: Tensor) -> None:
        self._stored = stored

    @property
    def shape(self) -> tuple[int, ...]:
        return self._stored.shape[::-1]

    def read(self, first: int, out: Array) -> None:
        convert(_held.matrix(self._stored, None, out.dtype)[:, first : first + len(out)].T, out)


class Flattened(Tensor):
    """A matrix as one vector, row by row; or column by column if turned. Axes between rows and columns have length
    1."""

    def __init__(self, matrix: Tensor, *, turned: bool = False) -> None:
        self._matrix, self._turned = matrix, turned

    @property
    def shape(self) -> tuple[int, ...]:
        return (prod(self._matrix.shape),)

    def read(self, first: int, out: Array) -> None:
        matrix = _held.matrix(self._matrix, None, out.dtype)
        vector = matrix.reshape(len(matrix), -1).T.ravel() if self._turned else matrix.reshape(-1)
        convert(vector[first : first + len(out)], out)


class Unrolled(Tensor):
    """A tensor [rows, …] as a matrix: all other axes are its columns, in order."""

    def __init__(self, whole: Tensor) -> None:
        self._whole = whole

    @property
    def shape(self) -> tuple[int, ...]:
        rows, *axes = self._whole.shape
        return (rows, prod(axes))

    def read(self, first: int, out: Array) -> None:
        some = np.empty((len(out), *self._whole.shape[1:]), out.dtype)
        self._whole.read(first, some)
        np.copyto(out, some.reshape(out.shape))


def parted(joined: Tensor, count: int) -> Tensor:
    """Stacked matrices seen as [count, rows, columns]."""
    if not isinstance(joined, ArrayTensor):
        return _Parted(joined, count)
    rows, columns = joined.shape
    return ArrayTensor(joined.array.reshape(count, rows // count, columns))


class _Parted(Tensor):
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
            some, matrix = out[at : at + rows - begin], _held.matrix(self._matrices, number, out.dtype)
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


class Scaled(Tensor):
    """A vector, each element times its factor."""

    def __init__(self, whole: Readable, times: NDArray[np.float32]) -> None:
        self._whole, self._times = whole, times

    @property
    def shape(self) -> tuple[int, ...]:
        return self._whole.shape

    def read(self, first: int, out: Array) -> None:
        self._whole.read(first, out)
        out *= self._times[first : first + len(out)]


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
