"""Equal parts of matrices: what one of several ranks has of a weight, as floats or as its numbers are stored."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate

import numpy as np

from llmc.models.convert import Array
from llmc.models.sources.base import Tensor
from llmc.models.sources.reordered import Readable
from llmc.models.sources.stored import Stored
from llmc.quantize.formats.base import WHOLE_ROW, Quantized, WeightFormat

_ROWS = 1024  # that are read at a time
Ranges = Sequence[tuple[int, int]]
"""First row and number of rows of each."""


def splits_columns(format: WeightFormat, columns: int) -> bool:
    """Whether a row of several times `columns` elements has no group, and no block of groups, across two parts."""
    sizes = (format.group_size, getattr(format, "block", WHOLE_ROW))
    return all(size == WHOLE_ROW or columns % size == 0 for size in sizes)


class _Ranges:
    """Of rows of a whole, one below the other. Experts are hundreds, and rows are read a panel at a time."""

    def __init__(self, ranges: Ranges) -> None:
        self._begins = [begin for begin, _ in ranges]
        self._starts = list(accumulate((size for _, size in ranges), initial=0))

    @property
    def rows(self) -> int:
        return self._starts[-1]

    def places(self, first: int, count: int) -> Iterator[tuple[int, slice]]:
        """Of rows [first, first + count): the first row of the whole, and where it and those behind it go."""
        at, index = first, bisect_right(self._starts, first) - 1
        while at < first + count:
            end = min(first + count, self._starts[index + 1])
            if at < end:
                yield self._begins[index] + at - self._starts[index], slice(at - first, end - first)
            at, index = end, index + 1


class _StoredRows(Stored):
    def __init__(self, stored: Stored, ranges: _Ranges) -> None:
        self._stored, self._ranges = stored, ranges
        self.format, self.int8_inputs, self.columns = stored.format, stored.int8_inputs, stored.columns
        self.is_scattered = stored.is_scattered

    def read(self, first: int, out: Quantized) -> None:
        for begin, places in self._ranges.places(first, len(out.numbers)):
            self._stored.read(begin, out.rows(places))


class RowsOf(Tensor):
    """Ranges of rows of another tensor, one below the other."""

    def __init__(self, whole: Readable, stored: Stored | None, ranges: Ranges) -> None:
        self._whole, self._stored, self._ranges = whole, stored, _Ranges(ranges)

    @property
    def shape(self) -> tuple[int, ...]:
        return (self._ranges.rows, *self._whole.shape[1:])

    @property
    def stored(self) -> Stored | None:
        return None if self._stored is None else _StoredRows(self._stored, self._ranges)

    def read(self, first: int, out: Array) -> None:
        for begin, places in self._ranges.places(first, len(out)):
            self._whole.read(begin, out[places])


class _StoredColumns(Stored):
    def __init__(self, stored: Stored, columns: int, first: int) -> None:
        self._stored, self._columns, self._first = stored, columns, first
        self.format, self.int8_inputs, self.is_scattered = stored.format, stored.int8_inputs, stored.is_scattered

    def read(self, first: int, out: Quantized) -> None:
        count = out.numbers.shape[1]
        for at in range(0, len(out.numbers), _ROWS):
            some = out.rows(slice(at, at + _ROWS))
            whole = Quantized.empty(self.format, len(some.numbers), self._columns)
            self._stored.read(first + at, whole)
            np.copyto(some.numbers, whole.numbers[:, self._first : self._first + count])
            for name, plane in some.planes.items():
                of_row = whole.planes[name]
                # One for the whole row, or one for each so many elements.
                begin = 0 if of_row.shape[1] == plane.shape[1] else self._first * of_row.shape[1] // self._columns
                np.copyto(plane, of_row[:, begin : begin + plane.shape[1]])


class ColumnsOf(Tensor):
    """Columns [first, first + count) of a matrix. Its numbers are at hand where groups end at both; see
    `splits_columns`."""

    def __init__(self, whole: Readable, stored: Stored | None, first: int, count: int) -> None:
        self._whole, self._stored, self._first, self._count = whole, stored, first, count

    @property
    def shape(self) -> tuple[int, ...]:
        return (self._whole.shape[0], self._count)

    @property
    def stored(self) -> Stored | None:
        stored = self._stored
        if stored is None or stored.columns is not None or not splits_columns(stored.format, self._count):
            return None
        return _StoredColumns(stored, self._whole.shape[1], self._first)

    def read(self, first: int, out: Array) -> None:
        for at in range(0, len(out), _ROWS):
            some = np.empty((len(out[at : at + _ROWS]), self._whole.shape[1]), out.dtype)
            self._whole.read(first + at, some)
            np.copyto(out[at : at + _ROWS], some[:, self._first : self._first + self._count])
