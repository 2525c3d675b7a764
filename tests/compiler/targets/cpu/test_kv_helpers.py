"""The helpers that read and write the KV cache, compiled by themselves, beside numpy."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from llmc.compiler.targets.cpu.kernels.ir import kv_stores, vector
from llmc.compiler.targets.cpu.target import TARGETS, Target
from llmc.kv_dtypes import KV_DTYPES

from support.ir_probe import assembly, call, signatures
from support.kernel_harness import targets_here

pytestmark = pytest.mark.native

Array = NDArray[Any]
HERE = targets_here("x86-64-v3", "x86-64-v4", "icelake-server")
LEVELS = [TARGETS[name] for name in ("x86-64-v3", "x86-64-v4", "icelake-server", "znver4", "sapphirerapids")]
on_targets = pytest.mark.parametrize("target", HERE, ids=lambda target: target.name)
RNG = np.random.default_rng(7)
COUNTS = (1, 5, 16)
LANES = {name: dtype.per_word for name, dtype in KV_DTYPES.items()}
SCATTERS = tuple((d, s, c, o) for d in KV_DTYPES for s in (1, 3) for c in (5, 16) for o in range(LANES[d]))
SPREADS = tuple((d, c) for d in KV_DTYPES for c in COUNTS)
HALVES = np.float32([0, 1, -2.5, 65504, 65519, 65520, -1e9, 2**-14, 2**-24, 2**-25, 1.5 * 2**-24, np.inf, -np.inf, 0.1])
VALUES = (RNG.standard_normal(16) * 3).astype(np.float32)


def text_of(target: Target) -> str:
    stores = [kv_stores.stores(d, [s[1:] for s in SCATTERS if s[0] == d], COUNTS) for d in KV_DTYPES]
    return vector.helpers(target.mcpu) + "".join(stores)


def bits_of(values: Array, dtype: str) -> Array:
    """Elements as they are stored."""
    match dtype:
        case "bf16":
            return values.astype(ml_dtypes.bfloat16).view(np.uint16)
        case "f16":
            return values.astype(np.float16).view(np.uint16)
    return values.view(np.uint32)


def same(got: Array, expected: Array) -> None:
    np.testing.assert_array_equal(got.view(np.uint8), np.ascontiguousarray(expected).view(np.uint8))


@on_targets
@pytest.mark.parametrize(("dtype", "stride", "count", "first"), SCATTERS)
def test_elements_of_a_key(dtype: str, stride: int, count: int, first: int, target: Target) -> None:
    lanes = LANES[dtype]
    bits = bits_of(VALUES, dtype)
    out = np.full(17 * stride * lanes, 77, bits.dtype)
    expected = out.copy()
    for lane in range(count):
        word, place = divmod(lane + first, lanes)
        expected[word * stride * lanes + place] = bits[lane]
    call(text_of(target), kv_stores.scatter_name(dtype, stride, count, first), target, VALUES, out)
    same(out, expected)


@on_targets
@pytest.mark.parametrize(("dtype", "count"), SPREADS)
def test_elements_of_a_value_leave_the_others_alone(dtype: str, count: int, target: Target) -> None:
    lanes = LANES[dtype]
    bits = bits_of(VALUES, dtype)
    for place in range(lanes):
        out = np.full(17 * lanes, 77, bits.dtype)
        expected = out.copy()
        expected[place : place + lanes * count : lanes] = bits[:count]
        call(text_of(target), kv_stores.spread_name(dtype, count), target, VALUES, out, place)
        same(out, expected)


@on_targets
def test_halves(target: Target) -> None:
    values = np.append(HALVES, np.float32([np.nan, 3.14159]))
    with np.errstate(over="ignore"):
        halves = values.astype(np.float16)
    got = call(text_of(target), "round_f16", target, values).view(np.float16)
    np.testing.assert_array_equal(got, halves)
    words = np.stack([halves, halves[::-1]], 1).copy().view(np.int32)[:, 0]
    np.testing.assert_array_equal(call(text_of(target), "f16_low", target, words), halves.astype(np.float32))
    np.testing.assert_array_equal(call(text_of(target), "f16_high", target, words), halves[::-1].astype(np.float32))


@pytest.mark.parametrize("target", LEVELS, ids=lambda target: target.name)
def test_all_assemble_everywhere(target: Target) -> None:
    text = text_of(target)
    added = signatures(text).keys() - signatures(vector.helpers(target.mcpu)).keys()
    assert len(added) == len(SCATTERS) + len(SPREADS)
    assert "vcvtps2ph" in assembly(text, "round_f16", target)
    assert "vcvtph2ps" in assembly(text, "f16_high", target)
