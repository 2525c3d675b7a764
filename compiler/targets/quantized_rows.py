"""Rows of a parameter in the format that they are to be stored in."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from llmc.models.loader import Parameter
from llmc.quantize.formats.base import Quantized


def quantized_rows(parameter: Parameter) -> Callable[[int, Quantized], None]:
    """What writes rows [first, first + len(out.numbers)) of a matrix: rounded to the nearest numbers.

    It holds memory for as many rows as it was asked for before; not shared between threads. Raises QuantizeError.
    """
    held = np.empty((0, parameter.shape[1]), np.float32)

    def read(first: int, out: Quantized) -> None:
        nonlocal held
        rows = len(out.numbers)
        if rows > len(held):
            held = np.empty((rows, parameter.shape[1]), np.float32)
        parameter.read(first, held[:rows])
        out.format.quantize_rows(held[:rows], out)

    return read
