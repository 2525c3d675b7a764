"""Matrices with reordered rows or columns: the sources of act-order weights."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from llmc.models.convert import Array
from llmc.models.sources.base import Tensor
from llmc.models.sources.stored import Stored
from llmc.quantize.formats.base import Quantized

_ROWS = 1024  # rows read at a time
Order = NDArray[np.int32]


class Readable(Protocol):
    """The common interface of `Tensor` and parameters."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def read(self, first: int, out: Array) -> None: ...


class _InOwnOrder(Stored):
    """Numbers as stored, of the matrix with columns in stored order."""

    def __init__(self, stored: Stored) -> None:
        self._stored, self.format, self.int8_inputs = stored, stored.format, stored.int8_inputs

    def read(self, first: int, out: Quantized) -> None:
        self._stored.read(first, out)


class ColumnsTaken(Tensor):
    """The matrix whose column j is column columns[j] of another, in the order of its stored numbers.

    With columns [matrices, K] this applies to each of that many equal blocks of rows.
    """

    def __init__(self, whole: Readable, stored: Stored | None, columns: Order) -> None:
        self._whole, self._stored, self._columns = whole, stored, columns

    @property
    def shape(self) -> tuple[int, ...]:
        return self._whole.shape

    @property
    def stored(self) -> Stored | None:
        return None if self._stored is None else _InOwnOrder(self._stored)

    def read(self, first: int, out: Array) -> None:
        for at in range(0, len(out), _ROWS):
            some = np.empty(out[at : at + _ROWS].shape, out.dtype)
            self._whole.read(first + at, some)
            np.copyto(out[at : at + _ROWS], self._taken(some, first + at))

    def _taken(self, rows: Array, first: int) -> Array:
        """Reorders the columns of rows from row `first` on."""
        if self._columns.ndim == 1:
            found: Array = rows[:, self._columns]
            return found
        of_matrix = self.shape[0] // len(self._columns)
        orders = self._columns[(first + np.arange(len(rows))) // of_matrix]
        return np.take_along_axis(rows, orders, 1)


class _ScatteredRows(Stored):
    is_scattered = True

    def __init__(self, stored: Stored, order: Order) -> None:
        self._stored, self._order = stored, order
        self.format, self.int8_inputs, self.columns = stored.format, stored.int8_inputs, stored.columns

    def read(self, first: int, out: Quantized) -> None:
        """Reads all rows in stored order."""
        wanted, k = self._order[first : first + len(out.numbers)], out.numbers.shape[1]
        held = Quantized.empty(self.format, min(_ROWS, len(self._order)), k)
        for begin in range(0, len(self._order), _ROWS):
            places = np.flatnonzero((wanted >= begin) & (wanted < begin + _ROWS))
            if len(places):
                some = held.rows(slice(min(_ROWS, len(self._order) - begin)))
                self._stored.read(begin, some)
                rows = wanted[places] - begin
                out.numbers[places] = some.numbers[rows]
                for name, plane in some.planes.items():
                    out.planes[name][places] = plane[rows]


class RowsTaken(Tensor):
    """The tensor whose row i is row order[i] of another."""

    def __init__(self, whole: Readable, stored: Stored | None, order: Order) -> None:
        self._whole, self._stored, self._order = whole, stored, order

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self._order), *self._whole.shape[1:])

    @property
    def stored(self) -> Stored | None:
        return None if self._stored is None else _ScatteredRows(self._stored, self._order)

    def read(self, first: int, out: Array) -> None:
        wanted = self._order[first : first + len(out)]
        # Read rows at once that are consecutive in both orders.
        starts = np.concatenate(([0], np.flatnonzero(np.diff(wanted) != 1) + 1, [len(wanted)]))
        for begin, end in itertools.pairwise(starts.tolist()):
            if end > begin:
                self._whole.read(int(wanted[begin]), out[begin:end])


def _halves(blocks: int, rows: int, first: int, count: int) -> Iterator[tuple[int, int, slice]]:
    """Splits rows [first, first + count) of `PairsParted`: (first row of the pairs, parity, destination rows)."""
    half, at = rows // (2 * blocks), 0
    while at < count:
        number, begin = divmod(first + at, half)
        block, second = divmod(number, 2)
        some = min(half - begin, count - at)
        yield 2 * (block * half + begin), second, slice(at, at + some)
        at += some


class _PairsParted(Stored):
    def __init__(self, stored: Stored, rows: int, blocks: int) -> None:
        self._stored, self._rows, self._blocks = stored, rows, blocks
        self.format, self.int8_inputs, self.columns = stored.format, stored.int8_inputs, stored.columns

    def read(self, first: int, out: Quantized) -> None:
        count, k = out.numbers.shape
        for begin, second, places in _halves(self._blocks, self._rows, first, count):
            both = Quantized.empty(self.format, 2 * (places.stop - places.start), k)
            self._stored.read(begin, both)
            out.numbers[places] = both.numbers[second::2]
            for name, plane in both.planes.items():
                out.planes[name][places] = plane[second::2]


class PairsParted(Tensor):
    """The even rows, then the odd rows, of each of `blocks` equal blocks."""

    def __init__(self, whole: Readable, stored: Stored | None, blocks: int) -> None:
        self._whole, self._stored, self._blocks = whole, stored, blocks

    @property
    def shape(self) -> tuple[int, ...]:
        return self._whole.shape

    @property
    def stored(self) -> Stored | None:
        return None if self._stored is None else _PairsParted(self._stored, self.shape[0], self._blocks)

    def read(self, first: int, out: Array) -> None:
        for begin, second, places in _halves(self._blocks, self.shape[0], first, len(out)):
            both = np.empty((2 * (places.stop - places.start), *out.shape[1:]), out.dtype)
            self._whole.read(begin, both)
            np.copyto(out[places], both[second::2])
