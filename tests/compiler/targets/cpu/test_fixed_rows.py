"""bf16 activations as fixed-point numbers: no less accurate than bf16 itself, and what cannot be one is told."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from llmc.compiler.targets.cpu.kernels.codegen import llvm_text
from llmc.compiler.targets.cpu.kernels.linear.kernel import default_schedule
from llmc.compiler.targets.cpu.kernels.linear.spec import linear_quant_spec
from llmc.compiler.targets.cpu.kernels.registry import build_kernel
from llmc.compiler.targets.cpu.packing import pack_activation
from llmc.compiler.targets.cpu.quant_packing import pack_quantized, unpack_quantized
from llmc.compiler.targets.cpu.target import TARGETS
from llmc.quantize import WeightFormat
from llmc.quantize.formats.affine import Affine
from llmc.quantize.formats.codes import Codes
from llmc.quantize.formats.integers import Integers

from support.fixed_point import fixed_point
from support.kernel_harness import run, targets_here

pytestmark = [
    pytest.mark.native,
    pytest.mark.skipif(not targets_here("x86-64-v3"), reason="this machine runs no code for x86-64-v3"),
]

TARGET = TARGETS["x86-64-v3"]
BF16 = ml_dtypes.bfloat16
W8, W4, W4Z, W8Z = Integers(8), Integers(4, 64), Integers(4, 32, True), Integers(8, 64, True)
Q4_K, Q6_K, MXFP4 = Affine(4), Affine(6, 16, 256, False), Codes("e2m1", 32, "e8m0")
Q4_AND_6 = Affine(6, 16)
Q5_1, NVFP4 = Affine(5, 32, 32, True), Codes("e2m1", 16)
EVERY = pytest.mark.parametrize(
    "format",
    [W8, W4, W4Z, W8Z, Q4_K, Q5_1, Q6_K, Q4_AND_6, MXFP4, NVFP4],
    ids=lambda f: "-".join(map(str, f.record().values())),
)
N, K = 40, 204  # one K for all tests: a kernel takes longer to compile than to test


def multiply(x: NDArray[Any], packed: dict[str, NDArray[Any]], format: WeightFormat, tile: int = 4) -> NDArray[Any]:
    """x · wᵀ by a kernel; the same bits with one row a tile."""
    rows, k = x.shape
    found = []
    for of_tile in (tile, 1):
        operands = {{"numbers": "w"}.get(name, name): array for name, array in packed.items()}
        arrays = {"x": pack_activation(x, of_tile), **operands, "y": np.full((rows, N), np.nan, np.float32)}
        spec = linear_quant_spec(N, k, of_tile, "bf16", format)
        found.append(run(spec, TARGET, arrays, written=("y",), scalars={0: rows})["y"])
    of_tiles, of_rows = found
    assert np.array_equal(of_tiles.view(np.int32), of_rows.view(np.int32))
    return of_tiles


def packed_of(format: WeightFormat, k: int, seed: int = 1) -> tuple[dict[str, NDArray[Any]], NDArray[np.float64]]:
    weight = np.random.default_rng(seed).standard_normal((N, k)).astype(np.float32)
    packed = pack_quantized(weight, TARGET.panel_columns, format)
    return packed, unpack_quantized(packed, N, k, format).value()


def activations(kind: str, rows: int, k: int) -> NDArray[np.float64]:
    rng = np.random.default_rng(7)
    x = rng.standard_normal((rows, k))
    match kind:
        case "outlier channels":
            x[:, 5::97] *= 1000
        case "heavy tails":
            x = rng.standard_t(2, (rows, k))
        case "gated":
            x = x / (1 + np.exp(-x)) * rng.standard_normal((rows, k)) ** 3
        case "sparse":
            x *= rng.random((rows, k)) < 0.05
        case "tiny":
            x *= 1e-30
    return x


@EVERY
@pytest.mark.parametrize("kind", ["normal", "outlier channels", "heavy tails", "gated", "sparse", "tiny"])
def test_no_less_accurate_than_bf16(kind: str, format: WeightFormat) -> None:
    """Beside float64 of the activations before they became bf16, exact arithmetic on bf16 errs as much."""
    x = activations(kind, 60, K)
    rounded = x.astype(BF16)
    packed, value = packed_of(format, K)
    wanted = x @ value.T
    error = np.sqrt(np.mean((multiply(rounded, packed, format) - wanted) ** 2))
    of_bf16 = np.sqrt(np.mean((rounded.astype(np.float64) @ value.T - wanted) ** 2))
    assert error <= 1.02 * of_bf16


@EVERY
def test_the_error_is_bounded(format: WeightFormat) -> None:
    """Also where all that is large meets zeros of the weight: 2⁻¹⁵ of the largest magnitude of a group, each."""
    packed, value = packed_of(format, K)
    x = np.random.default_rng(3).standard_normal((6, K))
    x[:, ::32] *= 3000
    rounded = x.astype(BF16)
    wide = rounded.astype(np.float64)
    largest = np.repeat(np.maximum.reduceat(np.abs(wide), np.arange(0, K, 32), 1), 32, axis=1)[:, :K]
    allowed = (2.0**-15 * largest + 1e-5 * np.abs(wide)) @ np.abs(value).T
    assert (np.abs(multiply(rounded, packed, format) - wide @ value.T) <= allowed).all()


def test_what_is_large_keeps_every_bit() -> None:
    x = np.random.default_rng(0).uniform(1 / 128, 1, (9, 64)) * np.random.default_rng(1).choice((-1.0, 1.0), (9, 64))
    x[:, ::32] = 1
    rounded = x.astype(BF16)
    assert np.array_equal(fixed_point(rounded, 32), rounded.astype(np.float64))


@EVERY
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_no_number_is_told(bad: float, format: WeightFormat) -> None:
    """In the rows that have it, and in no other."""
    x = activations("normal", 7, K).astype(BF16)
    packed, _ = packed_of(format, K)
    good = multiply(x, packed, format)
    x[2, 3], x[5, K - 1] = bad, bad
    found = multiply(x, packed, format)
    assert np.isnan(found[[2, 5]]).all()
    others = [0, 1, 3, 4, 6]
    assert np.array_equal(found[others], good[others])


@EVERY
def test_zeros_and_denormals(format: WeightFormat) -> None:
    packed, value = packed_of(format, K)
    x = np.zeros((4, K))
    x[1, :32], x[2], x[3, 40] = 1.0, 1e-40, 1e30
    found = multiply(x.astype(BF16), packed, format)
    assert (found[0] == 0).all()
    np.testing.assert_allclose(found[1], value[:, :32].sum(1), rtol=1e-5, atol=1e-5)
    assert (np.abs(found[2]) < 1e-35).all()
    np.testing.assert_allclose(found[3], float(BF16(1e30)) * value[:, 40].astype(np.float32), rtol=1e-5)


@pytest.mark.parametrize("format", [W8, W8Z, W4Z], ids=["row", "zero-8", "zero-4"])
def test_the_largest_numbers_do_not_overflow(format: WeightFormat) -> None:
    k = 512
    packed, _ = packed_of(format, k)
    top = (1 << format.bits) - 1
    packed["numbers"][...] = np.where(np.arange(TARGET.panel_columns)[:, None] % 2, 0xFF, 0)
    if "zero" in packed:
        packed["zero"][..., ::3] = top
        packed["zero"][..., 1::3] = 0
    value = unpack_quantized(packed, N, k, format).value()
    largest = float(BF16(2 - 2.0**-7))
    x = np.stack([np.full(k, largest), np.full(k, -largest), np.resize((largest, -largest), k)]).astype(BF16)
    wide = x.astype(np.float64)
    error = np.abs(multiply(x, packed, format) - wide @ value.T)
    assert (error <= 1e-6 * (np.abs(wide) @ np.abs(value).T)).all()


@pytest.mark.parametrize("k", [896, 4864, 28672])
def test_rows_on_the_stack(k: int) -> None:
    """docs/c-abi.md: what hosts are told to give, also with the most rows that are tried."""
    spec = linear_quant_spec(N, k, TARGET.row_tile, "bf16", W4, gated="bf16")
    for rows, most in ((None, 0.8), (1024, 1.75)):
        default = default_schedule(spec, TARGET)
        assert default is not None
        schedule = default if rows is None else replace(default, chunk_rows=rows)
        code = llvm_text(build_kernel(spec, TARGET, schedule), TARGET, "asm")
        frames = [int(size) for size in re.findall(r"subq?\s+\$(\d+), %rsp", code)]
        assert 0 < max(frames) <= most * (1 << 20)


def test_instructions() -> None:
    """Products are of integers, and no weight becomes a float."""
    for tile in (1, 4):
        spec = linear_quant_spec(N, 1024, tile, "bf16", W4)
        code = llvm_text(build_kernel(spec, TARGET), TARGET, "asm")
        assert "vpmaddwd" in code
        assert code.count("vcvtdq2ps") < code.count("vpmaddwd") / 4
