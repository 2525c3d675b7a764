"""Matrices that lie otherwise than the model has them: their values, and how often their sources are read for them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from llmc.models.convert import DTYPES, Array, convert
from llmc.models.sources.base import ArrayTensor, Tensor
from llmc.models.sources.reshaped import Flattened, Stacked, Transposed, parted


class Source(Tensor):
    """Values that are computed when they are read. elements: of all reads."""

    def __init__(self, values: Array) -> None:
        self._values, self.elements = values, 0

    @property
    def shape(self) -> tuple[int, ...]:
        return self._values.shape

    def read(self, first: int, out: Array) -> None:
        self.elements += out.size
        convert(self._values[first : first + len(out)], out)


VALUES = np.random.default_rng(3).standard_normal((6, 20, 8), np.float32)
JOINED = VALUES.reshape(-1, 8)
CASES: list[tuple[Array, Callable[[Tensor], Tensor], Array]] = [
    (JOINED, Transposed, JOINED.T),
    (JOINED, Flattened, JOINED.reshape(-1)),
    (VALUES, Stacked, JOINED),
    (VALUES, lambda source: Stacked(source, turned=True), VALUES.swapaxes(1, 2).reshape(-1, 20)),
    (JOINED, lambda source: Stacked(parted(source, 6), turned=True), VALUES.swapaxes(1, 2).reshape(-1, 20)),
]


def read(tensor: Tensor, dtypes: tuple[str, ...], rows: int = 4) -> dict[str, Array]:
    """All of a tensor, some rows at a time, in every dtype in turn."""
    assert tensor.shape[0] > rows
    found = {name: np.empty(tensor.shape, DTYPES[name]) for name in dtypes}
    for first in range(0, tensor.shape[0], rows):
        for out in found.values():
            tensor.read(first, out[first : first + rows])
    return found


@pytest.mark.parametrize(("values", "reshaped", "expected"), CASES)
def test_values_are_read_once_and_rounded_once(
    values: Array, reshaped: Callable[[Tensor], Tensor], expected: Array
) -> None:
    for dtypes in (("bf16",), ("f32",), ("f32", "bf16")):  # the last as conversions are measured
        source = Source(values)
        found = read(reshaped(source), dtypes)
        assert source.elements == values.size
        assert read(reshaped(ArrayTensor(values)), dtypes).keys() == found.keys()
        for name, array in found.items():
            assert np.array_equal(array, expected.astype(DTYPES[name]))
            assert np.array_equal(array, read(reshaped(ArrayTensor(values)), dtypes)[name])


def test_matrices_of_an_array_are_views_of_it() -> None:
    found = parted(ArrayTensor(JOINED), 6)
    assert isinstance(found, ArrayTensor)
    assert np.shares_memory(found.array, JOINED)
