"""Rows of a parameter in the weight format to be stored."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from llmc.models.loader import Parameter
from llmc.models.sources.stored import Stored
from llmc.quantize.formats.base import Quantized, WeightFormat

_AHEAD = 1024
"""Rows read at a time from a checkpoint with stored numbers: some layouts are column-major."""


def quantized_rows(parameter: Parameter, format: WeightFormat) -> Callable[[int, Quantized], None]:
    """Returns a function that writes rows [first, first + len(out.numbers)) of a matrix, called in ascending order.

    The rows are the checkpoint's own if it stores them in `format` and in the matrix's column order. Otherwise they are
    rounded to nearest.

    The function buffers some rows and is not thread-safe. Raises QuantizeError.
    """
    stored = parameter.stored
    if stored is not None and stored.format == format and stored.columns is None:
        return _StoredRows(stored, parameter.shape).read
    held = np.empty((0, parameter.shape[1]), np.float32)

    def read(first: int, out: Quantized) -> None:
        nonlocal held
        rows = len(out.numbers)
        if rows > len(held):
            held = np.empty((rows, parameter.shape[1]), np.float32)
        parameter.read(first, held[:rows])
        format.quantize_rows(held[:rows], out)

    return read


class _StoredRows:
    """Reads many rows at a time, and returns a few at a time."""

    def __init__(self, stored: Stored, shape: tuple[int, ...]) -> None:
        self._stored, (self._rows, k) = stored, shape
        ahead = self._rows if stored.is_scattered else min(_AHEAD, self._rows)
        self._held = Quantized.empty(stored.format, ahead, k)
        self._first = self._count = 0

    def read(self, first: int, out: Quantized) -> None:
        done, rows = 0, len(out.numbers)
        while done < rows:
            at = first + done
            if not self._first <= at < self._first + self._count:
                self._first, self._count = at, min(len(self._held.numbers), self._rows - at)
                self._stored.read(at, self._held.rows(slice(self._count)))
            some = min(rows - done, self._first + self._count - at)
            source = slice(at - self._first, at - self._first + some)
            self._held.rows(source).copy_to(out.rows(slice(done, done + some)))
            done += some
