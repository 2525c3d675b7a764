"""Pieces of matrices: as floats, and as their numbers are stored, with what lies beside these."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from llmc.models.sources.base import ArrayTensor, Tensor
from llmc.models.sources.sliced import ColumnsOf, RowsOf, splits_columns
from llmc.models.sources.stored import Stored
from llmc.quantize import get_scheme
from llmc.quantize.formats.base import Quantized, WeightFormat

ROWS, COLUMNS = 24, 128
VALUES = np.random.default_rng(1).standard_normal((ROWS, COLUMNS)).astype(np.float32)


class _Held(Stored):
    def __init__(self, of: Quantized) -> None:
        self._of, self.format = of, of.format

    def read(self, first: int, out: Quantized) -> None:
        self._of.rows(slice(first, first + len(out.numbers))).copy_to(out)


def held(format: WeightFormat) -> tuple[_Held, NDArray[Any]]:
    quantized = Quantized.empty(format, ROWS, COLUMNS)
    format.quantize_rows(VALUES.copy(), quantized)
    return _Held(quantized), quantized.value()


def read(tensor: Tensor) -> NDArray[np.float32]:
    out = np.empty(tensor.shape, np.float32)
    # In two steps, as a packer reads.
    tensor.read(0, out[:7])
    tensor.read(7, out[7:])
    return out


def stored_value(tensor: Tensor) -> NDArray[Any]:
    stored = tensor.stored
    assert stored is not None
    out = Quantized.empty(stored.format, *tensor.shape)
    stored.read(0, out.rows(slice(0, 7)))
    stored.read(7, out.rows(slice(7, tensor.shape[0])))
    return out.value()


RANGES = [(4, 6), (12, 3), (20, 4)]
TAKEN = np.concatenate([np.arange(first, first + count) for first, count in RANGES])


def test_rows_and_columns_of_floats() -> None:
    whole = ArrayTensor(VALUES)
    np.testing.assert_array_equal(read(RowsOf(whole, None, RANGES)), VALUES[TAKEN])
    np.testing.assert_array_equal(read(ColumnsOf(whole, None, 32, 48)), VALUES[:, 32:80])
    assert RowsOf(whole, None, RANGES).stored is None


@pytest.mark.parametrize("name", ["w4a16", "w4a8", "w8a16", "fp8", "mxfp4", "nvfp4", "nf4", "iq4_nl"])
def test_stored_numbers_are_those_of_the_whole(name: str) -> None:
    format = get_scheme(name).weight
    if format.is_regrouped:
        format = format.regrouped(32, None)
    stored, value = held(format)
    whole = ArrayTensor(VALUES)
    np.testing.assert_array_equal(stored_value(RowsOf(whole, stored, RANGES)), value[TAKEN])
    width = 64
    assert splits_columns(format, width)
    for first in (0, width):
        found = stored_value(ColumnsOf(whole, stored, first, width))
        np.testing.assert_array_equal(found, value[:, first : first + width])


def test_a_group_across_two_pieces_has_no_stored_numbers() -> None:
    format = get_scheme("w4a16").weight.regrouped(64, None)
    stored, _ = held(format)
    assert not splits_columns(format, 32)
    assert ColumnsOf(ArrayTensor(VALUES), stored, 0, 32).stored is None
