"""Kernels against numpy in float64, with guard bytes, and their bit-exactness rules."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from llmc.compiler.kernel_spec import KernelSpec, KernelSpecError
from llmc.compiler.targets.cpu.kernels.codegen import compile_object, llvm_text
from llmc.compiler.targets.cpu.kernels.linear.spec import linear_spec
from llmc.compiler.targets.cpu.kernels.registry import build_kernel, kernel_buffers
from llmc.compiler.targets.cpu.kernels.sources import TEMPLATE_FILES, source_digest
from llmc.compiler.targets.cpu.packing import pack_activation, pack_linear, unpack_activation, unpack_linear
from llmc.compiler.targets.cpu.target import TARGETS, Target, native_target
from llmc.compiler.targets.elf.link import link_shared
from llmc.models.activations import activated

from support.kernel_harness import Tolerance, run, targets_here
from support.marks import on_levels, spread

pytestmark = pytest.mark.native

NATIVE = native_target()
BF16 = np.dtype(ml_dtypes.bfloat16)
NUMPY = {"f32": np.dtype(np.float32), "bf16": BF16, "f16": np.dtype(np.float16)}
CPUS = targets_here("cooperlake", "x86-64-v4", "x86-64-v3")
on_cpus = on_levels(CPUS)
dtypes = pytest.mark.parametrize("dtype", list(NUMPY))


def random(*shape: int, seed: int = 0, dtype: str = "f32") -> NDArray[Any]:
    return np.random.default_rng((seed, *shape)).standard_normal(shape).astype(np.float32).astype(NUMPY[dtype])


def same_bits(a: NDArray[Any], b: NDArray[Any]) -> bool:
    return bool((np.ascontiguousarray(a).view(np.uint8) == np.ascontiguousarray(b).view(np.uint8)).all())


def empty_act(rows: int, width: int, tile: int, dtype: str) -> NDArray[Any]:
    """A packed activation full of NaN, so that what a kernel leaves out shows."""
    return pack_activation(np.full((-(-rows // tile) * tile, width), np.nan, NUMPY[dtype]), tile)


def padding_is_zero(packed: NDArray[Any], rows: int, width: int) -> bool:
    """The K padding of every valid row is zero."""
    wide = unpack_activation(packed, rows, packed.shape[1] * packed.shape[3])
    return bool((wide[:, width:].astype(np.float32) == 0).all())


# --- packing and registry ------------------------------------------------------------------------------------------


@dtypes
@pytest.mark.parametrize(("n", "k"), [(96, 64), (50, 65), (1, 1), (49, 7)])
def test_packing_round_trip(n: int, k: int, dtype: str) -> None:
    weight = random(n, k, dtype=dtype)
    packed = pack_linear(weight, 48)
    lanes = 1 if dtype == "f32" else 2
    assert packed.shape == (-(-n // 48), -(-k // lanes), 48, lanes)
    assert same_bits(unpack_linear(packed, n, k), weight)
    assert packed[0, 0, 0, 0] == weight[0, 0]
    assert np.count_nonzero(packed.astype(np.float32)) == np.count_nonzero(weight.astype(np.float32))
    assert packed[(n - 1) // 48, (k - 1) // lanes, (n - 1) % 48, (k - 1) % lanes] == weight[n - 1, k - 1]


def test_unknown_op_and_missing_parameter_are_clear() -> None:
    with pytest.raises(KernelSpecError, match="no kernel template for op 'conv'"):
        build_kernel(KernelSpec.of("other", "conv"), NATIVE)
    with pytest.raises(KernelSpecError, match="needs the parameter 'dim'"):
        build_kernel(KernelSpec.of("gather", "gather_rows"), NATIVE)


def test_digests_differ_by_op() -> None:
    digests = {op: source_digest(op) for op in TEMPLATE_FILES}
    assert len(set(digests.values())) == len(TEMPLATE_FILES)
    assert all(len(d) == 64 for d in digests.values())


# --- embedding and gather ------------------------------------------------------------------------------------------


@on_cpus
@dtypes
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dim", [65, 64])
def test_embedding(target: Target, dtype: str, packed: bool, dim: int) -> None:
    vocab, rows, seen = 515, 19, 17
    table = random(vocab, dim, dtype=dtype)
    ids = np.random.default_rng(1).integers(0, vocab, rows).astype(np.int32)
    ids[:2] = 0, vocab - 1
    spec = KernelSpec.of(
        "embedding",
        "embedding",
        dim=dim,
        vocab=vocab,
        weight_dtype=dtype,
        packed=packed,
        panel_columns=target.panel_columns,
    )
    weight = pack_linear(table, target.panel_columns) if packed else table
    for tasks in (1, 3):
        arrays = {"ids": ids, "weight": weight, "out": np.full((rows, dim), np.nan, np.float32)}
        out = run(spec, target, arrays, written=("out",), scalars={0: seen}, num_tasks=tasks)["out"]
        assert same_bits(out[:seen], table[ids[:seen]].astype(np.float32))
        assert np.isnan(out[seen:]).all()


@on_cpus
@dtypes
@pytest.mark.parametrize("packed", [False, True])
def test_parts_of_an_embedding_add_up_to_its_bits(target: Target, dtype: str, packed: bool) -> None:
    vocab, parts, rows, seen, dim = 516, 3, 19, 17, 65
    size = vocab // parts
    table = random(vocab, dim, dtype=dtype)
    ids = np.random.default_rng(1).integers(0, vocab, rows).astype(np.int32)
    ids[:6] = 0, size - 1, size, 2 * size - 1, 2 * size, vocab - 1
    # NaN, infinity, zeros of both signs, and a number that is not normal
    table[ids[:6], :5] = np.array([np.nan, -np.inf, 0.0, -0.0, 1e-39], np.float32)
    spec = KernelSpec.of(
        "embedding",
        "embedding",
        dim=dim,
        vocab=size,
        weight_dtype=dtype,
        packed=packed,
        first=True,
        panel_columns=target.panel_columns,
    )
    total: np.ndarray | None = None
    for part in range(parts):
        own = table[part * size :][:size]
        arrays = {
            "ids": ids,
            "weight": pack_linear(own, target.panel_columns) if packed else own,
            "first": np.array([part * size], np.float32),
            "out": np.full((rows, dim), np.nan, np.float32),
        }
        out = run(spec, target, arrays, written=("out",), scalars={0: seen}, num_tasks=3)["out"]
        assert np.isnan(out[seen:]).all()
        total = out[:seen] if total is None else total + out[:seen]
    assert total is not None
    assert same_bits(total, table[ids[:seen]].astype(np.float32))


@on_cpus
@pytest.mark.parametrize("dim", [65, 96])
def test_gather_rows(target: Target, dim: int) -> None:
    x, index = random(19, dim), np.array([18, 0, 7, 7, 3], np.int32)
    spec = KernelSpec.of("gather", "gather_rows", dim=dim)
    for tasks in (1, 2, 5):
        arrays = {"x": x, "index": index, "out": np.full((5, dim), np.nan, np.float32)}
        out = run(spec, target, arrays, written=("out",), scalars={2: 4}, num_tasks=tasks)["out"]
        assert same_bits(out[:4], x[index[:4]])
        assert np.isnan(out[4:]).all()


# --- norm and activation -------------------------------------------------------------------------------------------


def act_tolerance(dtype: str) -> Tolerance:
    rounding = {"f32": 2e-6, "bf16": 2.0**-8, "f16": 2.0**-11}
    return {"rtol": rounding[dtype], "atol": 1e-6}


def check_rows(
    specs: Mapping[int, KernelSpec],
    target: Target,
    inputs: Mapping[str, NDArray[Any]],
    expected: NDArray[np.float64],
    dtype: str,
) -> None:
    """A packed activation [rows, dim] as kernels of several row tiles write it: the same bits, near `expected`."""
    rows, dim = expected.shape
    outputs = []
    for tile, spec in specs.items():
        for tasks in (1, 2, 3, 5):
            arrays = {**inputs, "out": empty_act(rows, dim, tile, dtype)}
            packed = run(spec, target, arrays, written=("out",), scalars={0: rows}, num_tasks=tasks)["out"]
            outputs.append(unpack_activation(packed, rows, dim))
            assert same_bits(outputs[-1], outputs[0])
            assert padding_is_zero(packed, rows, dim)
    np.testing.assert_allclose(outputs[0].astype(np.float64), expected, **act_tolerance(dtype))


@spread("dim, dtype", CPUS, [65, 96, 7, 333], list(NUMPY))
def test_rms_norm(target: Target, dtype: str, dim: int) -> None:
    rows = 19
    x, weight = random(rows, dim), random(dim, seed=1)
    wide = x.astype(np.float64)
    expected = wide / np.sqrt((wide**2).mean(1, keepdims=True) + 1e-6) * weight
    specs = {
        tile: KernelSpec.of("norm", "rms_norm", dim=dim, eps=1e-6, row_tile=tile, act_dtype=dtype, rows=0)
        for tile in (1, 2, target.row_tile)
    }
    check_rows(specs, target, {"x": x, "weight": weight}, expected, dtype)


# --- linear --------------------------------------------------------------------------------------------------------


@spread(
    "n, k, bias, residual, dtype",
    CPUS,
    [(50, 65, True, True), (96, 1100, True, True), (515, 64, False, True), (7, 1, False, False)],
    list(NUMPY),
)
def test_linear(target: Target, dtype: str, n: int, k: int, bias: bool, residual: bool) -> None:
    rows_most = 19
    x, weight = random(rows_most, k, dtype=dtype), random(n, k, seed=1, dtype=dtype)
    shift, start = random(n, seed=2), random(rows_most, n, seed=3)
    expected = x.astype(np.float64) @ weight.astype(np.float64).T
    expected += (shift if bias else 0) + (start if residual else 0)
    packed_weight = pack_linear(weight, target.panel_columns)
    first: NDArray[Any] | None = None
    for tile in sorted({1, 2, 4, target.row_tile}):
        spec = linear_spec(n, k, tile, dtype, bias=bias, residual=residual)
        for rows, tasks in ((19, 1), (19, 3), (1, 2), (8, 5), (9, 2)):
            arrays = {
                "x": pack_activation(x, tile),
                "w": packed_weight,
                "y": np.full((rows_most, n), np.nan, np.float32),
            }
            arrays |= ({"bias": shift} if bias else {}) | ({"residual": start} if residual else {})
            y = run(spec, target, arrays, written=("y",), scalars={0: rows}, num_tasks=tasks)["y"]
            first = y if first is None else first
            assert same_bits(y[:rows], first[:rows]), f"tile {tile}, {rows} rows, {tasks} tasks"
            assert np.isnan(y[rows:]).all()
    assert first is not None
    np.testing.assert_allclose(first, expected, rtol=1e-5, atol=2e-6 * max(k, 4) ** 0.5 * 4)


@spread("n, k, bias, dtype", CPUS, [(100, 65, True), (192, 1100, True), (1030, 64, False), (14, 1, False)], list(NUMPY))
def test_gated_linear(target: Target, dtype: str, n: int, k: int, bias: bool) -> None:
    """Of the same sums, to the bit, as those of a layer without gate; only silu and the product may round."""
    rows_most, width = 19, n // 2
    x, weight, shift = random(rows_most, k, dtype=dtype), random(n, k, seed=1, dtype=dtype), random(n, seed=2)
    shift[:2], shift[width : width + 2] = (-200, 200), 1
    inputs = {"bias": shift} if bias else {}
    plain = {**inputs, "x": pack_activation(x, 1), "w": pack_linear(weight, target.panel_columns)}
    plain["y"] = np.full((rows_most, n), np.nan, np.float32)
    sums = run(linear_spec(n, k, 1, dtype, bias=bias), target, plain, written=("y",), scalars={0: rows_most})["y"]
    wide = sums.astype(np.float64)
    expected = wide[:, :width] / (1 + np.exp(-wide[:, :width])) * wide[:, width:]
    inputs["w"] = pack_linear(weight, target.panel_columns, 2)
    results: dict[str, NDArray[Any]] = {}
    tiles = sorted({1, 2, 4, target.row_tile})
    # Between the smallest tile and the largest nothing but the sums differs.
    halves = [(half, tile) for half in ("bf16", "f16") for tile in {1, target.row_tile}]
    for gated, tile in [*(("f32", tile) for tile in tiles), *halves]:
        spec = linear_spec(n, k, tile, dtype, bias=bias, gated=gated)
        for rows, tasks in ((19, 1), (19, 3), (1, 2), (8, 5), (9, 2)):
            arrays = {**inputs, "x": pack_activation(x, tile), "y": empty_act(rows_most, width, tile, gated)}
            y = run(spec, target, arrays, written=("y",), scalars={0: rows}, num_tasks=tasks)["y"]
            assert padding_is_zero(y, rows, width)
            y = unpack_activation(y, rows_most, width)
            first = results.setdefault(gated, y)
            assert same_bits(y[:rows], first[:rows]), f"{gated}, tile {tile}, {rows} rows, {tasks} tasks"
            assert np.isnan(y[rows:].astype(np.float32)).all()
    for half in ("bf16", "f16"):
        assert same_bits(results[half], results["f32"].astype(NUMPY[half]))
    np.testing.assert_allclose(results["f32"], expected, rtol=2e-6, atol=1e-30)


@on_cpus
@pytest.mark.parametrize(("dtype", "activation", "parts"), [("bf16", "gelu_tanh", 1), ("f32", "gelu", 2)])
def test_activations(target: Target, dtype: str, activation: str, parts: int) -> None:
    """Of the same sums as without activation; a row has the same bits in every tile, in a batch and alone."""
    rows_most, width, k = 19, 100, 300
    n = width * parts
    x, weight, bias = random(rows_most, k, dtype=dtype), random(n, k, seed=1, dtype=dtype), random(n, seed=2)
    weight = (weight.astype(np.float32) / 8).astype(weight.dtype)
    plain = {"bias": bias, "x": pack_activation(x, 1), "w": pack_linear(weight, target.panel_columns)}
    plain["y"] = np.full((rows_most, n), np.nan, np.float32)
    sums = run(linear_spec(n, k, 1, dtype, bias=True), target, plain, written=("y",), scalars={0: rows_most})["y"]
    first, *up = torch.from_numpy(sums).double().split(width, dim=1)
    expected = activated(first, activation) * (up[0] if up else 1)
    results: dict[str, NDArray[Any]] = {}
    inputs = {"bias": bias, "w": pack_linear(weight, target.panel_columns, parts)}
    for act, tile in ((act, tile) for act in ("f32", dtype) for tile in sorted({1, target.row_tile})):
        of = {"gated": act} if parts == 2 else {"activated": act}
        spec = linear_spec(n, k, tile, dtype, bias=True, activation=activation, **of)
        for rows, tasks in ((19, 2), (1, 1), (9, 1)):
            arrays = {**inputs, "x": pack_activation(x, tile), "y": empty_act(rows_most, width, tile, act)}
            y = run(spec, target, arrays, written=("y",), scalars={0: rows}, num_tasks=tasks)["y"]
            assert padding_is_zero(y, rows, width)
            y = unpack_activation(y, rows_most, width)
            known = results.setdefault(act, y)
            assert same_bits(y[:rows], known[:rows]), f"{act}, tile {tile}, {rows} rows, {tasks} tasks"
            assert np.isnan(y[rows:].astype(np.float32)).all()
    assert same_bits(results[dtype], results["f32"].astype(NUMPY[dtype]))
    np.testing.assert_allclose(results["f32"], expected.numpy(), rtol=5e-6, atol=1e-5)


def test_what_cannot_be_activated_is_refused() -> None:
    for arguments in ({"gated": "i8"}, {"gated": "f32", "residual": True}, {"activated": "f32", "residual": True}):
        with pytest.raises(KernelSpecError, match="no layer of 64 columns is activated as"):
            build_kernel(linear_spec(64, 64, 1, "f32", **arguments), NATIVE)
    with pytest.raises(KernelSpecError, match="the activation 'xielu' is not one of silu, gelu, gelu_tanh"):
        build_kernel(linear_spec(64, 64, 1, "f32", activated="f32", activation="xielu"), NATIVE)


@on_cpus
def test_linear_rows_beyond_one_chunk(target: Target) -> None:
    rows, n, k = 300, 64, 40
    for dtype in NUMPY:
        x, weight = random(rows, k, dtype=dtype), random(n, k, seed=1, dtype=dtype)
        results = []
        for tile, tasks in ((1, 1), (target.row_tile, 1), (target.row_tile, 3)):
            spec = linear_spec(n, k, tile, dtype, rows=2)
            arrays = {
                "x": pack_activation(x, tile),
                "w": pack_linear(weight, target.panel_columns),
                "y": np.full((rows, n), np.nan, np.float32),
            }
            results.append(run(spec, target, arrays, written=("y",), scalars={2: rows}, num_tasks=tasks)["y"])
        assert same_bits(results[0], results[1])
        assert same_bits(results[0], results[2])
        np.testing.assert_allclose(results[0], x.astype(np.float64) @ weight.astype(np.float64).T, rtol=1e-5, atol=1e-4)


@on_cpus
def test_float16_beyond_its_range_is_infinite(target: Target) -> None:
    """As IEEE and torch have it: 65519 still rounds to 65504, 65520 does not; nothing is cut off at the largest."""
    factor = np.array([65519, 65520, -1e9, 2.0**-25, 3e38, 65504] + [0.0] * 10, np.float32)
    spec = KernelSpec.of("norm", "rms_norm", dim=16, eps=0.0, row_tile=1, act_dtype="f16", rows=0)
    arrays = {"x": np.ones((1, 16), np.float32), "weight": factor, "out": empty_act(1, 16, 1, "f16")}
    out = unpack_activation(run(spec, target, arrays, written=("out",), scalars={0: 1})["out"], 1, 16)[0]
    assert list(out[:6]) == [65504, np.inf, -np.inf, 0, np.inf, 65504]
    assert not out[6:].any()


@pytest.mark.parametrize("target", [TARGETS["x86-64-v3"], TARGETS["x86-64-v4"], TARGETS["sapphirerapids"]])
def test_float16_layers_convert_by_instructions(target: Target) -> None:
    """Weights and activations become float32 in registers as wide as the level's; there are no products of float16."""
    for tile in (1, target.row_tile):
        code = llvm_text(build_kernel(linear_spec(96, 64, tile, "f16", gated="f16"), target), target, "asm")
        assert "vcvtph2ps" in code
        assert "vcvtps2ph" in code
        assert "vfmadd" in code
        assert ("%zmm" in code) == (target.lanes == 16)
        assert not any(word in code for word in ("call", "tdp", "vdpbf16ps", "vfmadd213ph", "vfmadd231ph"))


@pytest.mark.parametrize("name", ["cooperlake", "znver4", "znver5"])
def test_bf16_targets_use_the_dot_instruction(name: str, tmp_path: Path) -> None:
    target = TARGETS[name]
    spec = linear_spec(96, 64, target.row_tile, "bf16")
    func = build_kernel(spec, target)
    assert llvm_text(func, target, "asm").count("vdpbf16ps") >= target.row_tile * target.panel_columns // 16
    link_shared([compile_object(func, target)], tmp_path / "kernels.so")


def test_same_objects_link_to_the_same_bytes(tmp_path: Path) -> None:
    spec = KernelSpec.of("gather", "gather_rows", dim=20)
    for name in ("a.so", "b.so"):
        link_shared([compile_object(build_kernel(spec, NATIVE), NATIVE)], tmp_path / name)
    assert (tmp_path / "a.so").read_bytes() == (tmp_path / "b.so").read_bytes()


def test_buffers_follow_the_spec() -> None:
    spec = KernelSpec.of("linear", "linear", bias=True, residual=False)
    assert kernel_buffers(spec) == ("x", "w", "bias", "y")
