"""Linear layers in AMX tile registers: which instructions, and the bits of emulated ones beside those of vectors."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from llmc.compiler.targets.cpu.kernels.codegen import llvm_text
from llmc.compiler.targets.cpu.kernels.ir import tiles
from llmc.compiler.targets.cpu.kernels.linear.spec import linear_quant_spec, linear_spec
from llmc.compiler.targets.cpu.kernels.registry import build_kernel
from llmc.compiler.targets.cpu.packing import pack_activation, pack_linear, unpack_activation
from llmc.compiler.targets.cpu.quant_packing import pack_quantized, pack_quantized_activation, quantize_activation
from llmc.compiler.targets.cpu.target import TARGETS, Target, native_target, runs_here
from llmc.quantize import WeightFormat
from llmc.quantize.formats.integers import Integers
from llmc.quantize.formats.steps import Steps

from support import emulated_tiles
from support.kernel_harness import libraries, run
from support.marks import rare

pytestmark = pytest.mark.native

NATIVE = native_target()
AMX = TARGETS["sapphirerapids"]
# Without tile registers, and the same with emulated ones.
VECTORS = TARGETS[next((n for n in ("cooperlake", "icelake-server") if runs_here(TARGETS[n])), "x86-64-v4")]
TILES = replace(VECTORS, name="emulated", instruction_sets=(*VECTORS.instruction_sets, "amx-tile", "amx-int8"))
W8, W8_128, W4_ROW, W4_ROWZ = Integers(8), Integers(8, 128), Integers(4), Integers(4, -1, True)
W4, W4_64, W4_64Z = Integers(4, 128), Integers(4, 64), Integers(4, 64, True)
STEPS, STEPS_32 = Steps(64), Steps(32)
needs_avx512 = pytest.mark.skipif(NATIVE.isa_level < 2, reason="the vectors around the tiles are AVX-512's")


def random(*shape: int, seed: int = 0) -> NDArray[np.float32]:
    return np.random.default_rng((seed, *shape)).standard_normal(shape).astype(np.float32)


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "instructions", emulated_tiles.instructions)


# (format, N, K): K within a step, of whole steps, past one; in several blocks, of unpacked weights and of others.
CASES = [
    (W8, 7, 1),
    (W8, 115, 172),
    (W8, 48, 1152),
    (W8, 50, 6000),
    (W8_128, 50, 1100),
    (W4_ROW, 115, 172),
    (W4_ROWZ, 50, 1100),
    (W4, 48, 1152),
    (W4, 115, 1100),
    (W4_64, 50, 200),
    (W4_64Z, 50, 2030),
    (STEPS, 50, 2030),
    (STEPS, 48, 6000),
    (STEPS_32, 115, 1100),
]
# What these have others have, too: whole steps, several blocks, and groups.
SELDOM = [CASES[2], CASES[8], CASES[12]]
SIZES = [(9, 1), (16, 2), (19, 3), (33, 1), (170, 1), (170, 3)]  # rows, tasks; the longest K takes two chunks of these


@needs_avx512
@pytest.mark.parametrize(
    ("format", "width", "k", "after"),
    [(*case, "") for case in CASES if case not in SELDOM]
    + [rare(*case, "") for case in SELDOM]
    + [(*case, "gated") for case in CASES[1::3]]
    + [rare(*case, "gated") for case in CASES if case not in CASES[1::3]]
    + [(*CASES[-1], "activated"), rare(*CASES[-2], "activated")],
    ids=str,
)
def test_tiles_have_the_bits_of_vectors(emulated: None, format: WeightFormat, width: int, k: int, after: str) -> None:
    parts, rows_most = 2 if after == "gated" else 1, max(rows for rows, _ in SIZES)
    n = width * parts
    packed = pack_quantized(random(n, k, seed=1), 48, format, parts)
    numbers, row_scale = quantize_activation(random(rows_most, k))
    sums = format.sums
    assert sums is not None
    numbers[5], numbers[6] = -128, 127  # the lowest number, too, which rounding never gives
    of_sums = {after: "f32"} if after else {}
    spec = linear_quant_spec(n, k, 8, "i8", format, bias=True, residual=not after, **of_sums)
    arrays: dict[str, NDArray[Any]] = {"x": pack_quantized_activation(numbers, row_scale, 8, sums)}
    arrays |= {"w": packed["numbers"], "bias": random(n, seed=2)}
    arrays |= {plane.name: packed[plane.name] for plane in format.planes(k)}
    arrays |= {} if after else {"residual": random(rows_most, n, seed=3)}
    empty = np.full((rows_most, width), np.nan, np.float32)
    arrays["y"] = pack_activation(empty, 8) if after else empty

    def rows_by(target: Target, rows: int, tasks: int) -> NDArray[Any]:
        y = run(spec, target, arrays, written=("y",), scalars={0: rows}, num_tasks=tasks)["y"]
        return unpack_activation(y, rows_most, width) if after else y

    expected = rows_by(VECTORS, rows_most, 1)
    assert np.isfinite(expected).all()
    for rows, tasks in SIZES:
        y = rows_by(TILES, rows, tasks)
        assert (y[:rows].view(np.uint32) == expected[:rows].view(np.uint32)).all(), f"{rows} rows, {tasks} tasks"
        assert np.isnan(y[rows:]).all()
        assert not emulated_tiles.configured(libraries[spec, TILES]), "the registers were not released"


def assembly(format: WeightFormat, k: int = 1024, **options: Any) -> str:
    spec = linear_quant_spec(96, k, 8, "i8", format, **options)
    return llvm_text(build_kernel(spec, AMX), AMX, "asm")


def tile_instructions(code: str) -> list[str]:
    """In order, operands of memory as an m: `tileloadd m, 6`."""
    found = re.findall(r"^\s+(tile\w+|ldtilecfg|tdp\w+)\b[ \t]*([^\n#]*)", code, re.MULTILINE)
    operands = [re.sub(r"%tmm", "", re.sub(r"-?\w*\([^)]*\)|\S*\(%rip\)", "m", rest)).strip() for _, rest in found]
    return [f"{name} {rest}".strip() for (name, _), rest in zip(found, operands, strict=True)]


STEP = [
    *("tileloadd m, 6", "tileloadd m, 7", "tdpbsud 7, 6, 0"),
    *("tileloadd m, 7", "tdpbsud 7, 6, 1", "tileloadd m, 7", "tdpbsud 7, 6, 2"),
    *("tileloadd m, 6", "tdpbsud 7, 6, 5", "tileloadd m, 7", "tdpbsud 7, 6, 4", "tileloadd m, 7", "tdpbsud 7, 6, 3"),
]
"""32 rows × 48 columns: the last columns of the first rows are the first of the others."""


@pytest.mark.parametrize("format", [W8, W4_ROW, W4, W4_64Z, Integers(4, 192), STEPS, STEPS_32], ids=str)
def test_many_rows_use_tile_registers(format: WeightFormat) -> None:
    code = assembly(format)
    used = tile_instructions(code)
    assert used[0] == "ldtilecfg m"
    assert used.count("ldtilecfg m") == 1
    assert used[-1] == "tilerelease"
    text = " | ".join(used)
    assert " | ".join(STEP) in text
    assert " | ".join([f"tilestored {i}, m" for i in range(6)]) in text
    assert {f"tilezero {i}" for i in range(6)} <= set(used)
    assert "vpdpbusd" in code  # of few rows


@pytest.mark.parametrize("format", [Integers(4, 32), Integers(4, 96)], ids=str)
def test_groups_that_are_no_whole_steps_stay_with_vectors(format: WeightFormat) -> None:
    code = assembly(format)
    assert not tile_instructions(code)
    assert "vpdpbusd" in code


def test_few_rows_and_float_activations_of_quantized_layers_stay_with_vectors() -> None:
    for act, tile in (("i8", 4), ("i8", 1), ("f32", 8), ("bf16", 8)):
        code = llvm_text(build_kernel(linear_quant_spec(96, 256, tile, act, W8), AMX), AMX, "asm")
        assert not tile_instructions(code)


def test_other_targets_have_no_tile_registers() -> None:
    for target in TARGETS.values():
        code = llvm_text(build_kernel(linear_quant_spec(96, 256, target.row_tile, "i8", W8), target), target, "asm")
        assert bool(tile_instructions(code)) == (target.name == AMX.name)


# --- bf16 ----------------------------------------------------------------------------------------------------------

BF16 = np.dtype(ml_dtypes.bfloat16)
BF16_TILES = replace(
    VECTORS, name="emulated-bf16", instruction_sets=(*VECTORS.instruction_sets, "amx-tile", "amx-bf16")
)


def tdpbf16ps(x: NDArray[Any], weight: NDArray[Any]) -> NDArray[np.float32]:
    """x [T, K] by weight [N, K] as a chain of the instruction's steps; products of bf16 are exact in float64, so a sum
    rounded to float32 once is one fma. Without denormals."""
    (rows, k), n = x.shape, len(weight)
    padded = -(-k // 32) * 32
    a, c = np.zeros((rows, padded)), np.zeros((n, padded))
    a[:, :k], c[:, :k] = x.astype(np.float64), weight.astype(np.float64)
    total = np.zeros((rows, n), np.float32)
    for start in range(0, padded, 32):
        halves = np.zeros((2, rows, n), np.float32)
        for i in range(start, start + 32, 2):
            for half in (0, 1):
                halves[half] = (halves[half].astype(np.float64) + np.outer(a[:, i + half], c[:, i + half])).astype(
                    np.float32
                )
        total += halves[0] + halves[1]
    return total


@needs_avx512
@pytest.mark.parametrize(("n", "k"), [rare(7, 1), (115, 172), (48, 64), (50, 600), (96, 4099)])
def test_bf16_tiles_whatever_the_rows(emulated: None, n: int, k: int) -> None:
    rows_most = 300 if k < 4000 else 130  # the longest K takes two chunks of these
    x, weight = random(rows_most, k).astype(BF16), random(n, k, seed=1).astype(BF16)
    shift, start = random(n, seed=2), random(rows_most, n, seed=3)
    expected = tdpbf16ps(x, weight) + shift + start
    for tile in (1, 2, 4, 8):
        spec = linear_spec(n, k, tile, "bf16", bias=True, residual=True)
        given = pack_activation(x, tile)
        for rows, tasks in ((1, 1), (2, 3), (9, 1), (17, 2), (rows_most, 1), (rows_most, 3)):
            arrays = {"x": given, "w": pack_linear(weight, 48), "bias": shift, "residual": start}
            arrays["y"] = np.full((rows_most, n), np.nan, np.float32)
            y = run(spec, BF16_TILES, arrays, written=("y",), scalars={0: rows}, num_tasks=tasks)["y"]
            same = y[:rows].view(np.uint32) == expected[:rows].view(np.uint32)
            assert same.all(), f"tile {tile}, {rows} rows, {tasks} tasks: {(~same).sum()} differ"
            assert np.isnan(y[rows:]).all()
            assert not emulated_tiles.configured(libraries[spec, BF16_TILES]), "the registers were not released"


@needs_avx512
@pytest.mark.parametrize(("width", "k", "biased"), [(7, 1, False), (115, 172, True), rare(50, 600, False)])
def test_gated_bf16_tiles(emulated: None, width: int, k: int, biased: bool) -> None:
    n, rows_most = 2 * width, 70
    x, weight, shift = random(rows_most, k).astype(BF16), random(n, k, seed=1).astype(BF16), random(n, seed=2)
    sums = (tdpbf16ps(x, weight) + (shift if biased else 0)).astype(np.float64)
    expected = sums[:, :width] / (1 + np.exp(-sums[:, :width])) * sums[:, width:]
    first: dict[str, NDArray[Any]] = {}
    for gated in ("f32", "bf16"):
        for tile in (1, 4, 8):
            spec = linear_spec(n, k, tile, "bf16", bias=biased, gated=gated)
            for rows, tasks in ((rows_most, 3), (1, 1), (19, 2)):
                arrays = {"x": pack_activation(x, tile), "w": pack_linear(weight, 48, 2)}
                arrays |= {"bias": shift} if biased else {}
                empty = np.full((rows_most, width), np.nan, BF16 if gated == "bf16" else np.float32)
                arrays["y"] = pack_activation(empty, tile)
                y = run(spec, BF16_TILES, arrays, written=("y",), scalars={0: rows}, num_tasks=tasks)["y"]
                y = unpack_activation(y, rows_most, width)
                whole = first.setdefault(gated, y)
                assert (y[:rows] == whole[:rows]).all()
                assert np.isnan(y[rows:].astype(np.float32)).all()
    np.testing.assert_allclose(first["f32"], expected, rtol=2e-6, atol=1e-30)
    assert (first["bf16"] == first["f32"].astype(BF16)).all()


@needs_avx512
def test_numbers_that_are_none_stay_in_their_row(emulated: None) -> None:
    x, weight = random(16, 40).astype(BF16), random(48, 40, seed=1).astype(BF16)
    x[3] = np.nan
    spec = linear_spec(48, 40, 8, "bf16")
    arrays = {"x": pack_activation(x, 8), "w": pack_linear(weight, 48), "y": np.zeros((16, 48), np.float32)}
    y = run(spec, BF16_TILES, arrays, written=("y",), scalars={0: 16})["y"]
    assert np.isnan(y).any(1).tolist() == [row == 3 for row in range(16)]


@pytest.mark.parametrize("tile", [1, 2, 4, 8])
def test_bf16_layers_use_tile_registers(tile: int) -> None:
    code = llvm_text(build_kernel(linear_spec(96, 1024, tile, "bf16"), AMX), AMX, "asm")
    used = tile_instructions(code)
    assert used[0] == "ldtilecfg m"
    assert used[-1] == "tilerelease"
    step = [instruction.replace("tdpbsud", "tdpbf16ps") for instruction in STEP]
    assert " | ".join(step if tile == 8 else step[:7]) in " | ".join(used)
    assert "vdpbf16ps" not in code
    assert not tile_instructions(llvm_text(build_kernel(linear_spec(96, 1024, tile, "f32"), AMX), AMX, "asm"))
