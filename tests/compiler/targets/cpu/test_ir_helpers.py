"""Every helper of `kernels/ir`, compiled by itself, beside numpy; for other targets, that it assembles."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from llmc.compiler.targets.cpu.kernels.ir import (
    activations,
    bf16,
    elementary,
    fives,
    fp8,
    gates,
    int8,
    lookup,
    sixes,
    stores,
    vector,
)
from llmc.compiler.targets.cpu.target import TARGETS, Target, native_target
from llmc.models.activations import activated

from support.ir_probe import assembly, call, signatures
from support.kernel_harness import targets_here

pytestmark = pytest.mark.native

Array = NDArray[Any]
HERE = targets_here("x86-64-v3", "x86-64-v4", "icelake-server")
LEVELS = [TARGETS[name] for name in ("x86-64-v3", "x86-64-v4", "icelake-server", "znver4", "sapphirerapids")]
on_targets = pytest.mark.parametrize("target", HERE, ids=lambda target: target.name)
HALVES = {"bf16": np.dtype(ml_dtypes.bfloat16), "f16": np.dtype(np.float16)}
RNG = np.random.default_rng(7)
TILES, COUNTS = (1, 2, 8), (1, 5, 16)
PUTS = tuple((dtype, tile, count) for dtype in ("f32", *HALVES) for tile in TILES for count in COUNTS)
BYTE_PUTS = tuple((tile, words) for tile in TILES for words in (1, 3, 4))


def base_text(target: Target) -> str:
    return vector.helpers(target.mcpu, puts=PUTS)


def int8_text(target: Target) -> str:
    texts = int8.dot(target), int8.bytes_to_floats(), int8.nibble(target), int8.steps()
    return vector.helpers(target.mcpu) + "".join(texts) + int8.rounding_helpers(BYTE_PUTS)


def codes_text(target: Target) -> str:
    return vector.helpers(target.mcpu) + fp8.elements() + lookup.lookup(target) + fives.helpers(target)


def sixes_text(target: Target) -> str:
    return vector.helpers(target.mcpu) + sixes.helpers(target)


def rows_text(target: Target) -> str:
    return vector.helpers(target.mcpu) + int8.tile_rounding_helpers()


def elementary_text(target: Target) -> str:
    return vector.helpers(target.mcpu) + elementary.helpers()


def floats(scale: float = 1.0) -> NDArray[np.float32]:
    return (RNG.standard_normal(16) * scale).astype(np.float32)


def ints(low: int = -(1 << 31), high: int = 1 << 31) -> NDArray[np.int32]:
    return RNG.integers(low, high, 16).astype(np.int32)


def bits_of(x: Array, dtype: str) -> NDArray[np.int16]:
    with np.errstate(over="ignore"):
        return x.astype(HALVES[dtype]).view(np.int16)


def half_of(dtype: str, which: int) -> Callable[[Array], NDArray[np.float32]]:
    """The low or the high halves of words, as floats."""
    return lambda words: np.ascontiguousarray(words).view(HALVES[dtype])[which::2].astype(np.float32)


def same(found: Array, expected: Any) -> None:
    np.testing.assert_array_equal(found, expected)


def fused(a: Array, b: Array, c: Array) -> NDArray[np.float32]:
    """a · b + c with one rounding: the product is exact in float64, and so, but for very different sizes, the sum."""
    return (a.astype(np.float64) * b + c).astype(np.float32)


def tree(x: Array, step: Callable[[Array, Array], Array]) -> Array:
    for half in (8, 4, 2, 1):
        x = step(x, np.roll(x, -half))
    return x


def silu(x: Array) -> Array:
    return np.asarray(x / (1 + np.exp(-x.astype(np.float64))))


# ---- numbers to numbers ---------------------------------------------------------------------------------------------

A, B, C = floats(), floats(), floats()
EDGES = np.array(
    [0, -0.0, 1, -1, np.inf, -np.inf, np.nan, 0.5, 1.5, 2.5, -2.5, 3e38, -3e38, 1e-30, 7.3, -7.3], np.float32
)
# Ties and what is beside them, the largest float16 and what rounds to it or beyond, the smallest and its half.
NARROW_EDGES = np.array(
    [1 + 2**-11, 1 + 3 * 2**-11, 1 + 2**-11 + 2**-20, 65504, 65519.9, 65520, -65520, 1e9, -np.inf, 2**-14, 2**-24,
     2**-25, -(2**-25) * 1.5, 1e-7, 2**-14 - 2**-26, 1 + 2**-8],
    np.float32,
)  # fmt: skip
WORDS_OF_HALVES = ints()
WORDS_OF_HALVES &= 0x3BFFBBFF  # finite as either dtype
# Subnormal numbers, the smallest normal one, the largest and infinity of float16.
F16_EDGES = np.array([0x83FF0001, 0x04008400, 0x7BFFFBFF, 0x7C00FC00] * 4, np.uint32).view(np.int32)
WORDS = {"bf16": [WORDS_OF_HALVES], "f16": [WORDS_OF_HALVES, F16_EDGES]}
ROUNDED = [A, floats(1e30), np.where(np.isnan(EDGES), 1, EDGES).astype(np.float32), NARROW_EDGES]


def of_one_word(half: Callable[[Array], Array], lanes: int) -> Callable[[int], Array]:
    return lambda word: half(np.full(lanes, word, np.int32))


Cases = dict[str, tuple[Callable[..., Any], list[tuple[Any, ...]]]]


def cases_of(dtype: str) -> Cases:
    """Of the helpers of a 16-bit float."""

    def widened(bits: Array) -> Any:
        return bits.view(HALVES[dtype]).astype(np.float32)

    words, rounded = WORDS[dtype], [(x,) for x in ROUNDED]
    some = [(int(word),) for of_words in words for word in of_words[:4]]
    found: Cases = {
        f"round_{dtype}": (lambda x: bits_of(x, dtype), rounded),
        f"to_{dtype}": (lambda x: widened(bits_of(x, dtype)), rounded),
        f"widen_{dtype}": (widened, [(of_words.view(np.int16)[:16],) for of_words in words]),
    }
    for name, half in (("low", half_of(dtype, 0)), ("high", half_of(dtype, 1))):
        found |= {
            f"{dtype}_{name}": (half, [(of_words,) for of_words in words]),
            f"{dtype}_{name}_one": (of_one_word(half, 1), some),
            f"{dtype}_{name}_all": (of_one_word(half, 16), some),
        }
    return found


EXACT: Cases = {
    "mul": (lambda a, b: a * b, [(A, B)]),
    "add": (lambda a, b: a + b, [(A, B)]),
    "sub": (lambda a, b: a - b, [(A, B)]),
    "div": (lambda a, b: a / b, [(A, B)]),
    "sqrt": (np.sqrt, [(np.abs(A),)]),
    "max": (np.fmax, [(A, B)]),
    "larger": (lambda a, b: np.where(a > b, a, b), [(A, B), (EDGES, A), (A, EDGES)]),
    "fma": (fused, [(A, B, C)]),
    "fnma": (lambda a, b, c: fused(-a, b, c), [(A, B, C)]),
    "sum_lanes": (lambda a: tree(a, np.add), [(A,)]),
    "max_lanes": (lambda a: np.full(16, a.max()), [(A,)]),
    **cases_of("bf16"),
    **cases_of("f16"),
    "share": (lambda task, total, num: [task * total // num], [(2, 1 << 30, 3), (3, 29, 7), (0, 5, 1)]),
    "in_range": (
        lambda v, other, base, lo, hi: np.where((base + np.arange(16) >= lo) & (base + np.arange(16) <= hi), v, other),
        [(A, B, 10, 12, 20), (A, B, 0, 16, 40), (A, B, 5, 0, 40)],
    ),
    "forget_registers": (lambda: [0], [()]),
}


@on_targets
@pytest.mark.parametrize("name", EXACT)
def test_exact(name: str, target: Target) -> None:
    expected, cases = EXACT[name]
    for args in cases:
        with np.errstate(all="ignore"):
            same(call(base_text(target), name, target, *args), expected(*args))


@on_targets
@pytest.mark.parametrize(
    ("name", "expected", "x", "rtol"),
    [
        ("exp", np.exp, np.linspace(-87, 88, 16), 2e-7),
        ("exp2", np.exp2, np.linspace(-125, 0, 16), 2e-7),
        ("silu", silu, np.linspace(-20, 20, 16), 1e-6),
    ],
)
def test_functions_of_all_kernels(
    name: str, expected: Callable[[Array], Array], x: Array, rtol: float, target: Target
) -> None:
    x = x.astype(np.float32)
    np.testing.assert_allclose(call(base_text(target), name, target, x), expected(x.astype(np.float64)), rtol=rtol)


SMOOTH: dict[str, tuple[Callable[[Array], Array], Array]] = {
    "tanh": (np.tanh, np.linspace(-9, 9, 16)),
    "erf": (np.vectorize(math.erf), np.linspace(-5, 5, 16)),
    "log": (np.log, np.geomspace(1e-30, 1e30, 16)),
    "exp_any": (np.exp, np.linspace(-87, 88.7, 16)),
    "sigmoid": (lambda x: 1 / (1 + np.exp(-x)), np.linspace(-80, 80, 16)),
}
STEPS_OF_LANES: dict[str, Callable[..., Array]] = {
    "abs": np.abs,
    "floor": np.floor,
    "ceil": np.ceil,
    "round": np.rint,
    "maximum": np.maximum,
    "minimum": np.minimum,
    "maximum_lanes": lambda a: np.full(16, a.max()),
    "minimum_lanes": lambda a: np.full(16, a.min()),
}


@on_targets
@pytest.mark.parametrize("name", [*SMOOTH, *STEPS_OF_LANES])
def test_functions_of_generic_kernels(name: str, target: Target) -> None:
    text = elementary_text(target)
    if name in SMOOTH:
        expected, points = SMOOTH[name]
        x = points.astype(np.float32)
        np.testing.assert_allclose(call(text, name, target, x), expected(x.astype(np.float64)), rtol=2e-6, atol=1e-7)
        return
    binary = len(signatures(text)[name][1]) == 2
    for a, b in ((A, B), (EDGES, A)):
        args = (a, b) if binary else (a,)
        with np.errstate(all="ignore"):
            same(call(text, name, target, *args), STEPS_OF_LANES[name](*args))


# ---- memory ---------------------------------------------------------------------------------------------------------


@on_targets
@pytest.mark.parametrize("count", [0, 1, 7, 16, 20])
def test_masked_loads_and_stores(count: int, target: Target) -> None:
    text, n = base_text(target), min(count, 16)
    memory, halves = floats(), RNG.integers(-30000, 30000, 16).astype(np.int16)
    wanted = np.arange(16) < n
    same(call(text, "load_f32", target, memory, count), np.where(wanted, memory, 0))
    same(call(text, "load_i16", target, halves, count), np.where(wanted, halves, 0))
    stores_of: list[tuple[str, Array, Array]] = [("store_f32", A, A), ("store_i16", halves, halves)]
    for dtype, numpy in HALVES.items():
        expected = np.where(wanted, memory.astype(numpy).astype(np.float32), 0)
        same(call(text, f"load_{dtype}", target, bits_of(memory, dtype), count), expected)
        stores_of.append((f"store_{dtype}", A, bits_of(A, dtype)))
    for name, value, stored in stores_of:
        out = np.full(16, 77, stored.dtype)
        call(text, name, target, value, out, count)
        same(out, np.where(wanted, stored, np.array(77, stored.dtype)))


@on_targets
@pytest.mark.parametrize("name", ["prefetch", "prefetch_l2", "prefetch_write", "forget_memory"])
def test_hints_change_nothing(name: str, target: Target) -> None:
    memory = floats()
    before = memory.copy()
    same(call(base_text(target), name, target, memory), [0])
    same(memory, before)


def words_of(x: Array, dtype: str) -> NDArray[np.int32]:
    """Elements as packed words; an odd last one of 16 bits has a zero beside it."""
    if dtype == "f32":
        return x.astype(np.float32).view(np.int32)
    return bits_of(np.append(x, np.zeros(len(x) % 2, np.float32)), dtype).view(np.int32)


@on_targets
@pytest.mark.parametrize(("dtype", "tile", "count"), PUTS)
def test_puts(dtype: str, tile: int, count: int, target: Target) -> None:
    out = np.full(16 * tile, 77, np.int32)
    expected, words = out.copy(), words_of(A[:count], dtype)
    expected[: len(words) * tile : tile] = words
    call(base_text(target), stores.put_name(dtype, tile, count), target, A, out)
    same(out, expected)


@on_targets
@pytest.mark.parametrize("dtype", HALVES)
def test_a_whole_row_tile(dtype: str, target: Target) -> None:
    rows, out = [floats() for _ in range(8)], np.zeros(64, np.int32)
    call(base_text(target), stores.tile_name(dtype), target, *rows, out)
    same(out.reshape(8, 8), np.stack([words_of(row, dtype) for row in rows], axis=1))


# ---- bytes and nibbles ----------------------------------------------------------------------------------------------

W, X = ints(), ints()
ALL_255, ALL_128 = np.full(16, -1, np.int32), np.full(16, -2139062144, np.int32)  # bytes; the latter -128 as signed
CENTRED = np.arange(-8, 8, dtype=np.float32)
NUMBERS = np.repeat(np.arange(16, dtype=np.uint8), 4)  # a byte each, 0 … 15
STEPS, ZEROS = RNG.integers(1, 16, 16), RNG.integers(0, 16, 16)
OF_GROUP = (STEPS + 16 * ZEROS).astype(np.uint8)
TIMES, PLUS = (STEPS * 0x10001).astype(np.int32), (np.repeat(128 - STEPS * ZEROS, 4) % 256).astype(np.uint8)


def dot(acc: Array, w: Array, x: Array) -> Array:
    products = w.view(np.uint8).astype(np.int64) * x.view(np.int8)
    return np.asarray(acc + products.reshape(16, 4).sum(1), np.int32)


def rounded(v: Array, inverse: Array) -> Array:
    limited = np.fmin(np.fmax(v * inverse, np.float32(-127)), np.float32(127))
    return np.asarray(np.rint(limited), np.int32)


BYTES: dict[str, tuple[Callable[..., Any], list[tuple[Any, ...]]]] = {
    "dot_u8s8": (dot, [(ints(-1000, 1000), W, X), (ints(-9, 9), ALL_255, ALL_128)]),
    **{
        f"byte_{i}": (lambda w, i=i: w.view(np.int8).reshape(16, 4)[:, i].astype(np.float64) * 2.0**24, [(W,)])
        for i in range(4)
    },
    "signed_bytes": (lambda w: (w.view(np.uint8) - np.uint8(128)).view(np.int32), [(W,)]),
    "nibble": (lambda w, table: table[w & 15], [(W, CENTRED), (X, CENTRED + 8)]),
    "step_times": (lambda p: TIMES, [(OF_GROUP,)]),
    "step_plus": (lambda p: PLUS.view(np.int32), [(OF_GROUP,)]),
    "stepped": (
        lambda n, t, p: (n.view(np.uint8) * np.repeat(STEPS, 4) + PLUS).astype(np.uint8).view(np.int32),
        [(numbers.view(np.int32), TIMES, PLUS.view(np.int32)) for numbers in (NUMBERS, NUMBERS[::-1].copy())],
    ),
    "rounded": (rounded, [(floats(50), np.full(16, 1.7, np.float32)), (EDGES, np.ones(16, np.float32))]),
    "lanes_max": (lambda v: [v.max()], [(W,)]),
    "lanes_sum": (lambda v: [v.sum()], [(ints(-1000, 1000),)]),
}


@on_targets
@pytest.mark.parametrize("name", BYTES)
def test_bytes(name: str, target: Target) -> None:
    expected, cases = BYTES[name]
    for args in cases:
        with np.errstate(all="ignore"):
            same(call(int8_text(target), name, target, *args), expected(*args))


@on_targets
@pytest.mark.parametrize(("tile", "words"), BYTE_PUTS)
def test_puts_of_bytes(tile: int, words: int, target: Target) -> None:
    numbers, out = ints(-128, 128), np.full(4 * tile, 77, np.int32)
    expected = out.copy()
    expected[: words * tile : tile] = numbers.astype(np.int8).view(np.int32)[:words]
    call(int8_text(target), int8.put_name(tile, words), target, numbers, out)
    same(out, expected)


# Every code in every byte of some word.
ALL_CODES = [(((first + np.arange(16))[:, None] + 64 * np.arange(4)) % 256) for first in range(0, 256, 16)]
CODE_WORDS = [(codes.astype(np.uint8).view(np.int32)[:, 0],) for codes in ALL_CODES]
E4M3 = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
E4M3[[127, 255]] = 480, -480  # NaN, which no weight has
CODES: dict[str, tuple[Callable[..., Any], list[tuple[Any, ...]]]] = {
    **{
        f"e4m3_{i}": (lambda w, i=i: E4M3[w.view(np.uint8).reshape(16, 4)[:, i]] * np.float32(2**-8), CODE_WORDS)
        for i in range(4)
    },
    "lookup": (lambda w, table: table[w & 15], [(W, A), (X, B), (np.arange(-8, 8, dtype=np.int32), A)]),
    "five": (lambda w, *parts: np.concatenate(parts)[w & 31], [(w, CENTRED - 8, CENTRED + 8) for w in (W, X, W >> 27)]),
}


@on_targets
@pytest.mark.parametrize("name", CODES)
def test_codes(name: str, target: Target) -> None:
    expected, cases = CODES[name]
    for args in cases:
        found = call(codes_text(target), name, target, *args)
        same(found.view(np.int32), expected(*args).view(np.int32))


@on_targets
def test_numbers_of_five_bits_across_words(target: Target) -> None:
    w, others = W.view(np.uint16), X.view(np.uint16)
    for bit in (0, 4, 8, 12):
        found = call(codes_text(target), "fives_3", target, W, X, bit).view(np.uint16)
        same(found & (31 if target.lanes == 16 else 0xFFFF), (others >> bit & 15) | (w >> 11 & 16))


@on_targets
def test_numbers_of_six_bits(target: Target) -> None:
    text, w, others = sixes_text(target), W.view(np.uint16), X.view(np.uint16)
    same(call(text, "six", target, W, CENTRED), (W & 63) + CENTRED)
    for bit in (0, 8):
        found = call(text, "sixes_second", target, W, X, bit).view(np.uint16)
        same(found & (0xFFF if target.lanes == 16 else 0xFFFF), (others >> bit & 0xFF) | (w >> 4 & 0xF00))
    if target.lanes == 16:
        table = np.arange(1000, 1064, dtype=np.uint16)
        for i in (0, 1):
            found = call(text, f"looked_up_six_{i}", target, W, *table.view(np.int32).reshape(2, 16))
            same(found.view(np.uint16), table[w >> 6 * i & 63])


ROWS: dict[str, Callable[..., Any]] = {
    "rows_max": lambda v: np.maximum(v, np.roll(v, 8)),
    "rows_sum": lambda v: v + np.roll(v, 8),
    "join_even": lambda a, b: np.concatenate([a[:8], b[:8]]),
    "join_odd": lambda a, b: np.concatenate([a[8:], b[8:]]),
}


@on_targets
def test_rows_in_the_lanes(target: Target) -> None:
    text, v, w = rows_text(target), ints(-1000, 1000), ints(-128, 128)
    for name, expected in ROWS.items():
        args = (v, w)[: len(signatures(text)[name][1])]
        same(call(text, name, target, *args), expected(*args))
    out = np.zeros(8, np.int32)
    call(text, "store_rows", target, v, out)
    same(out, v[:8])
    call(text, "put_rows", target, w, v, out)
    elements = np.stack([w[:8], v[:8], w[8:], v[8:]], axis=1)
    same(out, elements.astype(np.int8).view(np.int32)[:, 0])


@on_targets
def test_a_limited_gate(target: Target) -> None:
    """Beyond the limits, at them and between; no number stays none."""
    limit, gain = 7.0, 1.702
    gate = np.array([-90, -9, -7, -1, -0.0, 0.5, 6.99, 7, 7.01, 90, np.inf, 4, np.nan, 1, 2, 3], np.float32)
    up = np.array([9, -9, 7, -7, 0, 0.5, -1, 3e38, -3e38, 1, np.inf, 2, 1, np.nan, -np.inf, 6], np.float32)
    with np.errstate(all="ignore"):
        held, within = np.minimum(gate.astype(np.float64), limit), np.clip(up.astype(np.float64), -limit, limit)
        expected = held / (1 + np.exp(-gain * held)) * (within + 1)
    text = vector.helpers(target.mcpu) + gates.limited(limit, gain)
    found = call(text, "limited_gate", target, gate, up)
    np.testing.assert_allclose(found, expected, rtol=2e-6, atol=1e-35)  # exp ends at some 88


@on_targets
@pytest.mark.parametrize("name", activations.ACTIVATIONS)
def test_activations_equal_torch_in_float64(name: str, target: Target) -> None:
    """Tiny results, too, except of GELU, where 1 + erf cancels, as 1 + tanh does in float64; no number stays none."""
    text = vector.helpers(target.mcpu) + activations.ACTIVATIONS[name]()
    for x in np.concatenate([np.linspace(-12, 12, 253), [np.nan, 1e18, -0.0]]).astype(np.float32).reshape(16, 16):
        wanted = activated(torch.from_numpy(x).double(), name).numpy()
        found = call(text, name, target, x)
        np.testing.assert_allclose(found, wanted, rtol=5e-6, atol=1e-6 if name == "gelu" else 1e-14)
    if name != "silu":
        least = np.full(16, -1e30, np.float32)
        same(call(text, name, target, least), -np.zeros(16) if "gelu" in name else np.zeros(16))


# ---- all of them ----------------------------------------------------------------------------------------------------


def test_no_helper_is_forgotten() -> None:
    target = native_target()
    tested = {*EXACT, *BYTES, *CODES, *ROWS, *SMOOTH, *STEPS_OF_LANES, "exp", "exp2", "silu", "store_rows", "put_rows"}
    tested |= {"fives_3", "six", "sixes_second", *(f"looked_up_six_{i}" for i in (0, 1) if target.lanes == 16)}
    tested |= {f"{kind}_{dtype}" for kind in ("load", "store") for dtype in ("f32", "i16", *HALVES)}
    tested |= {"prefetch", "prefetch_l2", "prefetch_write", "forget_memory", *map(stores.tile_name, HALVES)}
    tested |= {stores.put_name(*put) for put in PUTS} | {int8.put_name(*put) for put in BYTE_PUTS}
    texts = [of(target) for of in (base_text, int8_text, codes_text, sixes_text, rows_text, elementary_text)]
    assert {name for text in texts for name in signatures(text)} == tested


@pytest.mark.parametrize("target", LEVELS, ids=lambda target: target.name)
def test_products_of_bytes_assemble_everywhere(target: Target) -> None:
    code = assembly(int8_text(target), "dot_u8s8", target)
    assert ("vpdpbusd" in code) == target.int8_dot
    assert ("vpmaddwd" in code) != target.int8_dot
    assert ("vpermps" in assembly(int8_text(target), "nibble", target)) == (target.lanes == 16)


@pytest.mark.parametrize("target", LEVELS, ids=lambda target: target.name)
def test_codes_assemble_everywhere(target: Target) -> None:
    assert "vcvtph2ps" in assembly(codes_text(target), "e4m3_2", target)
    found = assembly(codes_text(target), "lookup", target)
    assert ("vblendvps" in found) == (target.lanes == 8)
    assert "vperm" in found


@pytest.mark.parametrize("target", LEVELS, ids=lambda target: target.name)
def test_float16_is_converted_by_instructions(target: Target) -> None:
    text = base_text(target)
    for name in ("f16_low", "f16_high", "f16_low_one", "f16_high_all", "load_f16", "widen_f16"):
        assert "vcvtph2ps" in assembly(text, name, target)
    for name in ("round_f16", "store_f16", stores.put_name("f16", 2, 16), stores.tile_name("f16")):
        assert "vcvtps2ph" in assembly(text, name, target)
    widest = "zmm" if target.lanes == 16 else "ymm"
    code = assembly(text, "to_f16", target)
    assert f"%{widest}" in code
    assert "call" not in code


def test_products_of_bf16_assemble_where_there_are_any() -> None:
    target = TARGETS["znver4"]
    text = vector.helpers(target.mcpu, bf16_dot=True)
    assert signatures(text).keys() - signatures(vector.helpers(target.mcpu)).keys() == signatures(bf16.dot()).keys()
    assert "vdpbf16ps" in assembly(text, "dot_bf16", target)
    assert "vcvtneps2bf16" in assembly(text, "narrow_bf16", target)
