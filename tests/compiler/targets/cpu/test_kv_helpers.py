"""The helpers that read and write the KV cache, compiled by themselves, beside numpy."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from llmc.compiler.targets.cpu.kernels.ir import fp8, kv_numbers, kv_stores, vector
from llmc.compiler.targets.cpu.target import TARGETS, Target
from llmc.kv_dtypes import KV_DTYPES

from support.ir_probe import assembly, call, signatures
from support.kernel_harness import targets_here
from support.kv_pools import FP8, SCALED, floats_of, rounded

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
HALVES = np.array(
    [0, 1, -2.5, 65504, 65519, 65520, -1e9, 2**-14, 2**-24, 2**-25, 1.5 * 2**-24, np.inf, -np.inf, 0.1], np.float32
)
VALUES = (RNG.standard_normal(16) * 3).astype(np.float32)


def text_of(target: Target) -> str:
    stores = [kv_stores.stores(d, [s[1:] for s in SCATTERS if s[0] == d], COUNTS) for d in KV_DTYPES]
    # Only one rounding comes with the helpers that find a scale.
    rounding = "".join(kv_numbers.rounding(d).removesuffix(kv_numbers.widest()) for d in SCALED)
    reads = kv_numbers.e5m2_elements() + fp8.elements() + kv_numbers.products(target)
    return "".join((vector.helpers(target.mcpu), rounding, kv_numbers.widest(), reads, *stores))


def bits_of(values: Array, dtype: str) -> Array:
    """Elements as they are stored."""
    match dtype:
        case "bf16":
            return values.astype(ml_dtypes.bfloat16).view(np.uint16)
        case "f16":
            return values.astype(np.float16).view(np.uint16)
        case "f32":
            return values.view(np.uint32)
    return rounded(values, dtype)


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
    values = np.append(HALVES, np.array([np.nan, 3.14159], np.float32))
    with np.errstate(over="ignore"):
        halves = values.astype(np.float16)
    got = call(text_of(target), "round_f16", target, values).view(np.float16)
    np.testing.assert_array_equal(got, halves)
    words = np.stack([halves, halves[::-1]], 1).copy().view(np.int32)[:, 0]
    np.testing.assert_array_equal(call(text_of(target), "f16_low", target, words), halves.astype(np.float32))
    np.testing.assert_array_equal(call(text_of(target), "f16_high", target, words), halves[::-1].astype(np.float32))


@on_targets
@pytest.mark.parametrize("dtype", list(FP8))
def test_every_float_of_8_bits(dtype: str, target: Target) -> None:
    """Read as it is, written as it was, and what lies between two goes to the nearer one, ties to even."""
    codes = np.arange(256, dtype=np.uint8)
    floats = floats_of(codes, dtype)
    codes, floats = codes[np.isfinite(floats)], floats[np.isfinite(floats)]
    # A half's largest exponent is that of infinity, so a few codes at the end are read through another helper's bias.
    name, gain = ("e4m3", 256.0) if dtype == "fp8_e4m3" else ("e5m2", 1.0)
    for place in range(4):
        for start in range(0, len(codes), 16):
            some = np.resize(codes[start : start + 16], 16)
            words = np.zeros((16, 4), np.uint8)
            words[:, place], words[:, (place + 1) % 4] = some, 0xFF
            got = call(text_of(target), f"{name}_{place}", target, words.view(np.int32)[:, 0]) * gain
            np.testing.assert_array_equal(got, floats_of(some, dtype))
    ordered = np.unique(np.abs(floats))
    between = (ordered[:-1] + ordered[1:]) / 2
    given = np.concatenate(
        [ordered, between, np.nextafter(between, 0), np.nextafter(between, 1e9), [1e9, np.inf, 1e-20]]
    )
    given = np.concatenate([given, -given]).astype(np.float32)
    out_of = kv_stores.scatter_name(dtype, 1, 16, 0)
    for start in range(0, len(given), 16):
        some, out = np.resize(given[start : start + 16], 16), np.zeros(16, np.uint8)
        call(text_of(target), out_of, target, some, out)
        same(out, rounded(some, dtype))


@on_targets
def test_products_with_numbers_of_16_bits(target: Target) -> None:
    text = text_of(target)
    numbers, factors = RNG.integers(0, 256, (16, 4)).astype(np.uint8), RNG.integers(-32767, 32768, 4)
    words = numbers.view(np.int32)[:, 0].copy()
    even, odd = call(text, "bytes_even", target, words), call(text, "bytes_odd", target, words)
    out = np.zeros(16, np.int16)
    call(text, "put_pairs", target, np.resize(factors, 16).astype(np.int32), out)
    pairs = out[:4].copy().view(np.int32)
    acc = call(text, "dot_s16", target, np.full(16, -5, np.int32), even, np.full(16, pairs[0], np.int32))
    acc = call(text, "dot_s16", target, acc, odd, np.full(16, pairs[1], np.int32))
    same(acc, (numbers.astype(np.int64) @ factors - 5).astype(np.int32))
    values = (RNG.standard_normal(16) * 40000).astype(np.float32)
    one, limit = np.ones(16, np.float32), np.full(16, 32767, np.float32)
    whole = call(text, "rounded_s16", target, values, one, limit)
    same(whole, np.clip(np.rint(values), -32767, 32767).astype(np.int32))
    assert int(np.asarray(call(text, "s16_sum", target, whole)).reshape(-1)[0]) == whole.sum()
    same(call(text, "floats_of", target, whole), whole.astype(np.float32))
    chosen = call(text, "unless", target, values, np.full(16, values[3], np.float32), one)
    same(chosen, np.where(np.arange(16) == 3, 0, one).astype(np.float32))


@on_targets
def test_the_widest_magnitude(target: Target) -> None:
    other = -VALUES[::-1].copy() * 2
    widest = np.maximum(np.abs(VALUES), np.abs(other))
    same(call(text_of(target), "widest", target, VALUES, other), widest)
    same(call(text_of(target), "widest_lane", target, widest), np.full(16, widest.max()))
    other[5] = np.nan
    with_nan = call(text_of(target), "widest", target, VALUES, other)
    assert np.isnan(call(text_of(target), "widest_lane", target, with_nan)).all()
    scales = np.full(16, 0.5, np.float32)
    same(call(text_of(target), "spoilt", target, scales, widest), scales)
    assert np.isnan(call(text_of(target), "spoilt", target, scales, np.full(16, np.inf, np.float32))).all()


@pytest.mark.parametrize("target", LEVELS, ids=lambda target: target.name)
def test_all_assemble_everywhere(target: Target) -> None:
    text = text_of(target)
    added = signatures(text).keys() - signatures(vector.helpers(target.mcpu)).keys()
    own = {"widest", "widest_lane", "spoilt", "dot_s16", "bytes_even", "bytes_odd"}
    own |= {"rounded_s16", "put_pairs", "s16_sum", "unless", "floats_of", *(f"round_{dtype}" for dtype in SCALED)}
    own |= {f"{name}_{place}" for name in ("e4m3", "e5m2") for place in range(4)}
    own |= {kv_stores.scatter_name(*s) for s in SCATTERS} | {kv_stores.spread_name(*s) for s in SPREADS}
    assert added == own
    assert "vcvtps2ph" in assembly(text, "round_f16", target)
    assert "vcvtph2ps" in assembly(text, "f16_high", target)
    # One instruction where there is one.
    assert ("vpdpwssd" in assembly(text, "dot_s16", target)) == target.int8_dot
