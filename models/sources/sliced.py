"""Equal parts of matrices: one rank's share of a weight, as floats or in stored form."""

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

_ROWS = 1024  # rows read at a time
Ranges = Sequence[tuple[int, int]]
"""(first row, number of rows) of each range."""


def splits_columns(format: WeightFormat, columns: int) -> bool:
    """Whether rows split into parts of `columns` elements without cutting a group or a block of groups."""
    sizes = (format.group_size, getattr(format, "block", WHOLE_ROW))
    return all(size == WHOLE_ROW or columns % size == 0 for size in sizes)


class _Ranges:
    """Concatenated ranges of rows. A mixture has hundreds, and rows are read a few at a time."""

    def __init__(self, ranges: Ranges) -> None:
        self._begins = [begin for begin, _ in ranges]
        self._starts = list(accumulate((size for _, size in ranges), initial=0))

    @property
    def rows(self) -> int:
        return self._starts[-1]

    def places(self, first: int, count: int) -> Iterator[tuple[int, slice]]:
        """Splits rows [first, first + count) by range: (first row of the whole, destination rows)."""
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
    """Ranges of rows of another tensor, concatenated."""

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
                # One scale for the whole row, or one per group of elements.
                begin = 0 if of_row.shape[1] == plane.shape[1] else self._first * of_row.shape[1] // self._columns
                np.copyto(plane, of_row[:, begin : begin + plane.shape[1]])


class ColumnsOf(Tensor):
    """Columns [first, first + count) of a matrix. Its stored numbers are usable if groups end at both bounds; see
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
