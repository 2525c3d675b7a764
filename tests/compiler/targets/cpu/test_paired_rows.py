"""Quantized numbers multiplied as bf16: exact products, sums of groups, the same bits for any number of rows."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from llmc.compiler.targets.cpu.kernels.codegen import llvm_text
from llmc.compiler.targets.cpu.kernels.linear import plan as plans
from llmc.compiler.targets.cpu.kernels.linear.kernel import default_schedule
from llmc.compiler.targets.cpu.kernels.linear.spec import linear_quant_spec, problem_of
from llmc.compiler.targets.cpu.kernels.registry import build_kernel
from llmc.compiler.targets.cpu.packing import pack_activation
from llmc.compiler.targets.cpu.quant_packing import pack_quantized, unpack_quantized
from llmc.compiler.targets.cpu.target import TARGETS, runs_here
from llmc.quantize import WeightFormat
from llmc.quantize.formats.affine import Affine
from llmc.quantize.formats.codes import Codes
from llmc.quantize.formats.fp8 import Fp8
from llmc.quantize.formats.integers import Integers

from support.kernel_harness import run

pytestmark = pytest.mark.native
TARGET = TARGETS["znver4"]
here = pytest.mark.skipif(not runs_here(TARGET), reason="this machine runs no code for znver4")
BF16 = ml_dtypes.bfloat16
W4, W4_ROWZ, NF4 = Integers(4, 64), Integers(4, -1, True), Codes("nf4", 64)
Q4_K, Q5_1, Q6_K = Affine(4), Affine(8, 32, 32, True), Affine(6, 16, 256, False, scale_kind="f16")
Q4_AND_6 = Affine(6, 16, scale_kind="f16")
Q8_0 = Integers(8, 32, scale_kind="f16")
MXFP4, IQ4_NL = Codes("e2m1", 32, "e8m0"), Affine(4, 32, 32, offsets=False, table="iq4_nl")
N, K, ROWS = 50, 203, 44  # K ends within a word, ROWS are more row tiles than read packed numbers


def multiply(x: NDArray[Any], packed: dict[str, NDArray[Any]], format: WeightFormat) -> NDArray[Any]:
    """x · wᵀ by a kernel; the same bits with one row a tile and with few rows."""
    found = []
    for tile, rows in ((TARGET.row_tile, len(x)), (TARGET.row_tile, 13), (TARGET.row_tile, 3), (1, 3)):
        operands = {{"numbers": "w"}.get(name, name): array for name, array in packed.items()}
        arrays = {"x": pack_activation(x, tile), **operands, "y": np.full((len(x), N), np.nan, np.float32)}
        spec = linear_quant_spec(N, x.shape[1], tile, "bf16", format)
        found.append(run(spec, TARGET, arrays, written=("y",), scalars={0: rows})["y"][:rows])
    for some in found[1:]:
        assert np.array_equal(some.view(np.int32), found[0][: len(some)].view(np.int32))
    return found[0]


@here
@pytest.mark.parametrize(
    "format", [W4_ROWZ, Q4_K, Q5_1, Q6_K, Q4_AND_6, Q8_0, MXFP4, IQ4_NL, Fp8()], ids=lambda f: f.describe()
)
def test_products_are_those_of_bf16(format: WeightFormat) -> None:
    """Beside float64. Infinite rows do not reach others, and what zero points and offsets take off does not remain."""
    rng = np.random.default_rng(1)
    packed = pack_quantized(rng.standard_normal((N, K)).astype(np.float32), TARGET.panel_columns, format)
    value = unpack_quantized(packed, N, K, format).value()
    x = rng.standard_normal((ROWS, K)).astype(BF16)
    x[1], x[2, 32:] = 3, 0
    wide = x.astype(np.float64)
    y = multiply(x, packed, format)
    assert (np.abs(y - wide @ value.T) <= 3e-6 * (np.abs(wide) @ np.abs(value).T)).all()
    x[0, K - 1] = np.inf
    spoilt = multiply(x, packed, format)
    assert not np.isfinite(spoilt[0]).any()
    assert np.array_equal(spoilt[1:], y[1:])


@here
def test_few_row_tiles_walk_packed_blocks() -> None:
    """Two row tiles read a panel of 8192 numbers in two blocks, while their own rows are whole on the stack."""
    rng, k = np.random.default_rng(2), 8192
    packed = pack_quantized(rng.standard_normal((N, k)).astype(np.float32), TARGET.panel_columns, W4)
    plan = plans.plan(problem_of(linear_quant_spec(N, k, TARGET.row_tile, "bf16", W4), TARGET), None)
    assert plan.few.count == plan.copied_tiles == 2
    x = rng.standard_normal((ROWS, k)).astype(BF16)
    expected = x.astype(np.float64) @ unpack_quantized(packed, N, k, W4).value().T
    assert np.abs(multiply(x, packed, W4) - expected).max() <= 1e-6 * np.abs(expected).max()


def asm(name: str, format: WeightFormat, tile: int, k: int = 1024) -> str:
    target = TARGETS[name]
    return llvm_text(build_kernel(linear_quant_spec(96, k, tile, "bf16", format), target), target, "asm")


def test_instructions() -> None:
    """Where a dot product of bf16 is fast and numbers are bf16, no number becomes a float32."""
    for tile in (1, 8):
        code = asm("znver4", W4, tile)
        assert "vpermw" in code
        assert "vcvtdq2ps" not in code
        assert code.count("vdpbf16ps") >= 12
    assert "vdpbf16ps" not in asm("sapphirerapids", W4, 8)
    assert "vdpbf16ps" not in asm("znver4", NF4, 1)


@pytest.mark.parametrize(("k", "times", "most"), [(28672, 1, 0.9), (4864, 2, 1.75)])
def test_rows_on_the_stack(k: int, times: int, most: float) -> None:
    """docs/c-abi.md: what hosts are told to give, also with the most rows that are tried."""
    spec = linear_quant_spec(N, k, TARGET.row_tile, "bf16", W4, gated="bf16")
    assert problem_of(spec, TARGET).paired
    default = default_schedule(spec, TARGET)
    assert default is not None
    schedule = replace(default, chunk_rows=times * default.chunk_rows)
    code = llvm_text(build_kernel(spec, TARGET, schedule), TARGET, "asm")
    frames = [int(size) for size in re.findall(r"subq?\s+\$(\d+), %rsp", code)]
    assert 0 < max(frames) <= most * (1 << 20)
