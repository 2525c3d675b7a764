"""Every helper of `kernels/ir/fixed.py`, compiled by itself, beside numpy. AVX2 alone has them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from llmc.compiler.targets.cpu.kernels.ir import fixed, vector
from llmc.compiler.targets.cpu.target import TARGETS

from support.ir_probe import call, signatures
from support.kernel_harness import targets_here

pytestmark = [
    pytest.mark.native,
    pytest.mark.skipif(not targets_here("x86-64-v3"), reason="this machine runs no code for x86-64-v3"),
]

Array = NDArray[Any]
TARGET = TARGETS["x86-64-v3"]
RNG = np.random.default_rng(3)
TABLE = [int(value) for value in RNG.integers(0, 25, 16)]
TILES = (1, 2, 4)
INF, NAN = 0x7F800000, 0x7FC00001


def text(tile: int = 1) -> str:
    pairs = (fixed.pairs(name, bits) for name, bits in (("nibbles", 4), ("fives", 5), ("sixes", 6), ("bytes", 8)))
    own = fixed.dot(), *pairs, fixed.table(TABLE), fixed.rows(tile)
    return vector.helpers(TARGET.mcpu) + "".join(own)


def words(low: int = -(1 << 31), high: int = 1 << 31) -> NDArray[np.int32]:
    return RNG.integers(low, high, 16).astype(np.int32)


def dot(acc: Array, w: Array, x: Array) -> Array:
    products = w.view(np.int16).astype(np.int64) * x.view(np.int16)
    return np.asarray(acc + products.reshape(16, 2).sum(1), np.int32)


def numbers(w: Array, bits: int, i: int) -> Array:
    return np.asarray((w.view(np.uint16) >> (i * bits)) & ((1 << bits) - 1), np.uint16).view(np.int32)


def largest(m: Array, w: Array) -> Array:
    return np.asarray(np.maximum(m, np.maximum((w << 16) & 0x7FFFFFFF, w & 0x7FFF0000)))


def exponent(m: Array) -> Array:
    return np.asarray(np.maximum(m >> 23, 15))


def times(m: Array) -> Array:
    return np.asarray(np.ldexp(np.float32(1), 14 + 127 - exponent(m)), np.float32)


def scale(m: Array) -> Array:
    return np.asarray(np.where(m >= INF, np.nan, np.ldexp(np.float32(1), exponent(m) - 14 - 127)), np.float32)


W, X = words(), words()
MAGNITUDES = np.array(
    [0, 1, 1 << 23, 14 << 23, 15 << 23, (15 << 23) + 9, 16 << 23, 127 << 23, (128 << 23) - 1, 200 << 23, 254 << 23,
     INF - 1, INF, NAN, 0x40490FDB, 0x3F000000],
    np.int32,
)  # fmt: skip
CASES: dict[str, tuple[Callable[..., Any], list[tuple[Any, ...]]]] = {
    "dot_s16": (dot, [(words(-1000, 1000), W & 0xFF00FF, X), (words(-9, 9), X & 0xF000F, np.full(16, -1, np.int32))]),
    **{f"nibbles_{i}": (lambda w, i=i: numbers(w, 4, i), [(W,), (X,)]) for i in range(4)},
    **{f"fives_{i}": (lambda w, i=i: numbers(w, 5, i), [(W,), (X,)]) for i in range(3)},
    **{f"sixes_{i}": (lambda w, i=i: numbers(w, 6, i), [(W,), (X,)]) for i in range(2)},
    **{f"bytes_{i}": (lambda w, i=i: numbers(w, 8, i), [(W,), (X,)]) for i in range(2)},
    "byte_table": (lambda w: np.array(TABLE, np.uint8)[w.view(np.uint8)].view(np.int32), [(W & 0x0F0F0F0F,)]),
    "fixed_largest": (largest, [(MAGNITUDES, W), (np.zeros(16, np.int32), X)]),
    "fixed_times": (times, [(np.minimum(MAGNITUDES, INF - 1),)]),
    "fixed_scale": (scale, [(MAGNITUDES,)]),
    **{f"largest_{n}": (lambda v, n=n: np.maximum(v, v[np.arange(16) ^ n]), [(W,)]) for n in (1, 2, 4, 8)},
    **{f"sum_{n}": (lambda v, n=n: v + v[np.arange(16) ^ n], [(W >> 2,)]) for n in (1, 2, 4, 8)},
}


@pytest.mark.parametrize("name", CASES)
def test_helpers(name: str) -> None:
    expected, cases = CASES[name]
    for args in cases:
        np.testing.assert_array_equal(call(text(), name, TARGET, *args), expected(*args))


@pytest.mark.parametrize("tile", TILES)
def test_numbers(tile: int) -> None:
    """Halves are rounded to even; numbers 0 and 2, 1 and 3 of a row's four are words."""
    values = np.concatenate([np.arange(-8, 8) + 0.5, RNG.integers(-255, 256, 16)]).astype(ml_dtypes.bfloat16)
    elements = values.reshape(16 // tile, tile, 2)  # of a word, of a row
    of_row = elements.transpose(1, 0, 2).reshape(tile, -1, 4).astype(np.float32)
    for factor in (1, 64):
        times = np.full(16, factor, np.float32)
        found = call(text(tile), f"fixed_numbers_{tile}", TARGET, values.view(np.int32), times).view(np.int16)
        found = found.reshape(-1, tile, 2).transpose(1, 0, 2).reshape(tile, -1, 4)
        np.testing.assert_array_equal(found, np.rint(of_row[:, :, [0, 2, 1, 3]] * factor))


def test_no_helper_is_forgotten() -> None:
    assert signatures(text()).keys() - signatures(vector.helpers(TARGET.mcpu)).keys() == {*CASES, "fixed_numbers_1"}
