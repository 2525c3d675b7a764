"""Kernels of quantized layers against the same numbers in float64, with guard bytes, on every ISA level of this CPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from llmc.compiler.kernel_spec import KernelSpec, KernelSpecError
from llmc.compiler.targets.cpu.kernels.codegen import llvm_text
from llmc.compiler.targets.cpu.kernels.linear.spec import linear_quant_spec
from llmc.compiler.targets.cpu.kernels.registry import build_kernel
from llmc.compiler.targets.cpu.packing import pack_activation, unpack_activation
from llmc.compiler.targets.cpu.quant_packing import (
    pack_quantized,
    pack_quantized_activation,
    pack_rows,
    quantize_activation,
    quantized_row_words,
    unpack_quantized,
)
from llmc.compiler.targets.cpu.target import TARGETS, Target, native_target
from llmc.quantize import WeightFormat
from llmc.quantize.formats.affine import Affine
from llmc.quantize.formats.base import Quantized, Sums
from llmc.quantize.formats.codes import E8M0, Codes
from llmc.quantize.formats.fp8 import Fp8
from llmc.quantize.formats.integers import Integers
from llmc.quantize.formats.registry import FORMATS
from llmc.quantize.formats.steps import Steps

from support.fixed_point import multiplied
from support.kernel_harness import run, targets_here
from support.marks import rare, spread

pytestmark = pytest.mark.native

NATIVE = native_target()
LEVELS = targets_here("cooperlake", "x86-64-v4", "x86-64-v3") or [NATIVE]
W5, Q5_1 = Integers(5, 32), Affine(5, 32, 32)
W8, W8_64, W8_32Z = Integers(8), Integers(8, 64), Integers(8, 32, True)
W4, W4_32, W4_64Z, W4_ROW = Integers(4, 128), Integers(4, 32), Integers(4, 64, True), Integers(4)
W4_ROWZ = Integers(4, -1, True)
STEPS, STEPS_32, STEPS_ROW = (Steps(size) for size in (64, 32, -1))
STEPSZ = Steps(64, True)
NUMPY = {"f32": np.dtype(np.float32), "bf16": np.dtype(ml_dtypes.bfloat16), "f16": np.dtype(np.float16)}
ROWS = 70  # more row tiles than read packed weights
on_levels = pytest.mark.parametrize("target", LEVELS, ids=lambda t: t.name)


def name_of(value: Any) -> str:
    if isinstance(value, WeightFormat):
        zero = "-zero" if getattr(value, "asymmetric", False) else ""
        return f"{value.bits}bit-{value.group_size}{zero}{'-steps' * (value.kind == 'steps')}"
    return str(getattr(value, "name", value))


def random(*shape: int, seed: int = 0) -> NDArray[np.float32]:
    return np.random.default_rng((seed, *shape)).standard_normal(shape).astype(np.float32)


def same_bits(a: NDArray[Any], b: NDArray[Any]) -> bool:
    return bool((np.ascontiguousarray(a).view(np.uint8) == np.ascontiguousarray(b).view(np.uint8)).all())


# BLOCKS takes several blocks of K where they are unpacked, DEEP everywhere, WHOLE is groups throughout; the others end
# within a line, a group, a panel. WIDE has more panels than are read side by side, LONG rows that are not copied whole.
ACROSS, BLOCKS, DEEP, WHOLE, TINY, WIDE = (115, 172), (50, 1100), (50, 6000), (48, 1152), (7, 1), (450, 172)
LONG = (7, 8200)


def sums_of(format: WeightFormat) -> Sums:
    assert format.sums is not None
    return format.sums


def sum_params(format: WeightFormat) -> dict[str, int]:
    """Parameters of a kernel that writes int8 activations for such a weight."""
    return {"group_size": sums_of(format).group_size, "sum_factor": sums_of(format).factor}


def packed_tensors(packed: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """The operands of a kernel that a weight is."""
    return {{"numbers": "w"}.get(name, name): array for name, array in packed.items()}


CASES = [
    *((NATIVE, act, format, BLOCKS) for act in ("i8", "f32") for format in (W8, W4, W4_ROW, W4_ROWZ)),
    *((NATIVE, "i8", format, DEEP) for format in (W8, W4, W4_ROWZ)),
    (NATIVE, "f32", W4, DEEP),
    *((NATIVE, act, format, ACROSS) for act in ("i8", "f32") for format in (W8, W4_32, W4_64Z)),
    *((NATIVE, "bf16", format, ACROSS) for format in (W8, W4_32, W4_64Z)),
    *((NATIVE, act, format, WHOLE) for act, format in (("i8", W4), ("i8", W4_64Z), ("f32", W4_64Z))),
    *((NATIVE, act, format, TINY) for act, format in (("i8", W8), ("f32", W4_32), ("bf16", W4_64Z))),
    *((level, *case, ACROSS) for level in LEVELS[1:] for case in (("i8", W8), ("i8", W4_64Z), ("f32", W4_32))),
    *((LEVELS[-1], "bf16", format, BLOCKS) for format in (W8, W4_ROWZ, W4_64Z)),
    *(
        (LEVELS[-1], "bf16", format, shape)
        for format, shape in ((W4_32, TINY), (W4, DEEP), (W8_32Z, WIDE), (W4, WHOLE))
    ),
    *((NATIVE, "f16", format, ACROSS) for format in (W8, W4_32, W4_64Z)),
    *((NATIVE, "f16", format, WIDE) for format in (W8, W4_64Z)),
    (NATIVE, "f16", W4_64Z, TINY),
    (NATIVE, "f16", W8, LONG),
    (LEVELS[-1], "f16", W8, BLOCKS),
    *((NATIVE, "i8", format, BLOCKS) for format in (STEPS_32, STEPS_ROW)),
    *((NATIVE, "i8", format, DEEP) for format in (STEPS, STEPSZ)),
    *((NATIVE, "i8", format, ACROSS) for format in (STEPS_32, STEPSZ)),
    *((NATIVE, "i8", STEPS, shape) for shape in (WHOLE, TINY)),
    *((level, "i8", STEPS, shape) for level in LEVELS[1:] for shape in (ACROSS, BLOCKS)),
    *((NATIVE, act, format, ACROSS) for act in ("i8", "f32") for format in (W8_64, W8_32Z)),
    *((NATIVE, "i8", format, WIDE) for format in (W8, W4_64Z, STEPS)),
    *((NATIVE, "bf16", format, WIDE) for format in (W8, W8_32Z, W4_64Z)),
    (LEVELS[-1], "i8", W8, WIDE),
    *((NATIVE, act, W5, shape) for act, shape in (("f32", BLOCKS), ("bf16", ACROSS))),
    *((level, "bf16", W5, ACROSS) for level in LEVELS[1:]),
    (NATIVE, "bf16", Q5_1, ACROSS),
]
# Whose kinds of loop and of group others have that run every time, though not together.
SELDOM = [
    *((NATIVE, act, W4_ROW, BLOCKS) for act in ("i8", "f32")),
    *((NATIVE, act, format, ACROSS) for act, format in (("f32", W8), ("f32", W4_64Z), ("bf16", W4_32))),
    *((NATIVE, act, format, ACROSS) for act, format in (("i8", W8_64), ("f32", W8_32Z), ("i8", STEPSZ))),
    *((NATIVE, "f16", format, ACROSS) for format in (W8, W4_64Z)),
    *((NATIVE, "i8", format, DEEP) for format in (W4, STEPS)),
    *((NATIVE, act, W8, WIDE) for act in ("i8", "bf16", "f16")),
    *((NATIVE, act, format, WIDE) for act, format in (("i8", STEPS), ("bf16", W4_64Z))),
    (NATIVE, "f32", W4, BLOCKS),
    (NATIVE, "i8", STEPS_32, BLOCKS),
    (NATIVE, "i8", W4_64Z, WHOLE),
    *((level, *case, ACROSS) for level in LEVELS[1:-1] for case in (("i8", W8), ("f32", W4_32), ("i8", STEPS))),
    *((LEVELS[-1], "bf16", format, shape) for format, shape in ((W4_ROWZ, BLOCKS), (W4, WHOLE))),
]


def tiles_of(target: Target, shape: tuple[int, int]) -> tuple[int, ...]:
    """The row tiles worth a test."""
    every = shape == BLOCKS
    return tuple(t for t in (1, 2, 4, 8) if t <= target.row_tile) if every else (1, target.row_tile)


@pytest.mark.parametrize(
    ("target", "act", "format", "shape"), [rare(*case) if case in SELDOM else case for case in CASES], ids=name_of
)
def test_linear_quant(target: Target, act: str, format: WeightFormat, shape: tuple[int, int]) -> None:
    n, k = shape
    extra = shape != TINY
    weight, x, shift, start = random(n, k, seed=1), random(ROWS, k), random(n, seed=2), random(ROWS, n, seed=3)
    packed = pack_quantized(weight, target.panel_columns, format)
    value = unpack_quantized(packed, n, k, format).value()
    if act == "i8":
        numbers, row_scale = quantize_activation(x)
        read = numbers * row_scale.astype(np.float64)[:, None]
    else:
        x = x.astype(NUMPY[act])
        read = multiplied(x, act, format, target)
    expected = read @ value.T + (shift + start if extra else 0)
    first: NDArray[Any] | None = None
    for tile in tiles_of(target, shape):
        given = (
            pack_quantized_activation(numbers, row_scale, tile, sums_of(format))
            if act == "i8"
            else pack_activation(x, tile)
        )
        spec = linear_quant_spec(n, k, tile, act, format, bias=extra, residual=extra)
        for rows, tasks in ((ROWS, 1), (ROWS, 3), (1, 2), (19, 2)):
            arrays = {"x": given, **packed_tensors(packed)}
            arrays |= {"bias": shift, "residual": start} if extra else {}
            arrays["y"] = np.full((ROWS, n), np.nan, np.float32)
            y = run(spec, target, arrays, written=("y",), scalars={0: rows}, num_tasks=tasks)["y"]
            first = y if first is None else first
            assert same_bits(y[:rows], first[:rows]), f"tile {tile}, {rows} rows, {tasks} tasks"
            assert np.isnan(y[rows:]).all()
    assert first is not None
    # Integer sums are exact; floats round once an element, K of them.
    bound = 1e-6 if act == "i8" else 3e-7 * max(k, 16) ** 0.5
    assert np.abs(first - expected).max() <= bound * np.abs(expected).max()


# Of the loops, which are tested above, those that end within a panel and a group: of int8 one format for each kind of
# them, of other activations one, which all share their last step. Rarely other formats, levels between, several blocks.
_USUAL = {"i8": (W8, W4_64Z, STEPS_32), "f32": (W4_64Z,), "bf16": (W8,), "f16": (W4_64Z,)}
_TINY = ((NATIVE, "i8", W8), (NATIVE, "f32", W4_32), (LEVELS[-1], "bf16", W4_32))
GATED = [
    case
    for case in CASES
    if (case[3] == TINY and case[:3] in _TINY)
    or (case[3] == ACROSS and case[2] in _USUAL[case[1]] and case[0] in (LEVELS[0], LEVELS[-1]))
]
GATED += [rare(*case) for case in CASES if case[3] in (ACROSS, BLOCKS, TINY) and case not in GATED]


@pytest.mark.parametrize(("target", "act", "format", "shape"), GATED, ids=name_of)
def test_gated_linear_quant(target: Target, act: str, format: WeightFormat, shape: tuple[int, int]) -> None:
    """Of the same sums, to the bit, as those of a layer without gate; only silu and the product may round."""
    (width, k), biased = shape, shape != TINY
    n = 2 * width
    weight, x, shift = random(n, k, seed=1), random(ROWS, k).astype(NUMPY.get(act, np.float32)), random(n, seed=2)

    def result(gated: str, tile: int, rows: int, tasks: int) -> NDArray[Any]:
        packed = pack_quantized(weight, target.panel_columns, format, 2 if gated else 1)
        spec = linear_quant_spec(n, k, tile, act, format, bias=biased, gated=gated)
        given = pack_activation(x, tile)
        if act == "i8":
            given = pack_quantized_activation(*quantize_activation(x), tile, sums_of(format))
        arrays = {"x": given, **packed_tensors(packed)} | ({"bias": shift} if biased else {})
        empty = np.full((ROWS, width if gated else n), np.nan, NUMPY[gated] if gated else np.float32)
        arrays["y"] = pack_activation(empty, tile) if gated else empty
        y = run(spec, target, arrays, written=("y",), scalars={0: rows}, num_tasks=tasks)["y"]
        return unpack_activation(y, ROWS, width) if gated else y

    sums = result("", target.row_tile, ROWS, 1).astype(np.float64)
    expected = sums[:, :width] / (1 + np.exp(-sums[:, :width])) * sums[:, width:]
    # The smallest tile and the largest: those between have the same last step, and loops that are tested above. What a
    # result is stored as has nothing to do with blocks and formats.
    halves = ("bf16", "f16") if shape != BLOCKS and format == W8 else ()
    ways = (("f32", 1), *((gated, target.row_tile) for gated in ("f32", *halves)))
    first: dict[str, NDArray[Any]] = {}
    for gated, tile in ways:
        for rows, tasks in ((ROWS, 1), (ROWS, 3), (1, 2), (19, 2)):
            y = result(gated, tile, rows, tasks)
            first.setdefault(gated, y)
            assert same_bits(y[:rows], first[gated][:rows]), f"{gated}, tile {tile}, {rows} rows, {tasks} tasks"
            assert np.isnan(y[rows:].astype(np.float32)).all()
    np.testing.assert_allclose(first["f32"], expected, rtol=2e-6, atol=1e-30)
    for half in halves:
        assert same_bits(first[half], first["f32"].astype(NUMPY[half]))


@pytest.mark.parametrize(
    ("format", "act"),
    [(W8, "i8"), (W4_64Z, "bf16"), (W8, "f32"), rare(W4_64Z, "i8"), rare(W8, "bf16"), rare(W4_64Z, "f32")],
    ids=name_of,
)
def test_activated_linear_quant(format: WeightFormat, act: str) -> None:
    """relu of the sums of a layer without activation, to the bit."""
    n, k = 100, 130
    weight, x = random(n, k, seed=1), random(ROWS, k).astype(NUMPY.get(act, np.float32))
    packed = packed_tensors(pack_quantized(weight, NATIVE.panel_columns, format))

    def result(tile: int, rows: int, **activated: str) -> NDArray[Any]:
        given = pack_activation(x, tile)
        if act == "i8":
            given = pack_quantized_activation(*quantize_activation(x), tile, sums_of(format))
        empty = np.full((ROWS, n), np.nan, np.float32)
        arrays = {"x": given, **packed, "y": pack_activation(empty, tile) if activated else empty}
        spec = linear_quant_spec(n, k, tile, act, format, **activated)
        y = run(spec, NATIVE, arrays, written=("y",), scalars={0: rows}, num_tasks=2)["y"]
        return unpack_activation(y, ROWS, n) if activated else y

    sums = result(NATIVE.row_tile, ROWS)
    for tile, rows in ((1, ROWS), (NATIVE.row_tile, ROWS), (NATIVE.row_tile, 19), (NATIVE.row_tile, 3)):
        y = result(tile, rows, activated="f32", activation="relu")
        assert same_bits(y[:rows], np.where(sums < 0, np.float32(0), sums)[:rows]), f"tile {tile}, {rows} rows"


@spread("format, act", LEVELS, [W8, W4_64Z], ["bf16", "f16"], ids=name_of)
def test_more_rows_than_are_widened_at_a_time(target: Target, format: WeightFormat, act: str) -> None:
    rows, (n, k) = 300, WIDE
    weight, x = random(n, k, seed=1), random(rows, k).astype(NUMPY[act])
    packed = pack_quantized(weight, target.panel_columns, format)
    expected = multiplied(x, act, format, target) @ unpack_quantized(packed, n, k, format).value().T
    results = []
    for tile, tasks in ((1, 1), (target.row_tile, 1), (target.row_tile, 3)):
        spec = linear_quant_spec(n, k, tile, act, format)
        arrays = {"x": pack_activation(x, tile), **packed_tensors(packed)}
        arrays["y"] = np.full((rows, n), np.nan, np.float32)
        results.append(run(spec, target, arrays, written=("y",), scalars={0: rows}, num_tasks=tasks)["y"])
    assert all(same_bits(y, results[0]) for y in results)
    assert np.abs(results[0] - expected).max() <= 3e-7 * k**0.5 * np.abs(expected).max()


@on_levels
def test_the_largest_numbers_do_not_overflow(target: Target) -> None:
    n, k = 16, 1024
    weight = np.where(np.arange(n)[:, None] % 2, 1.0, -1.0).astype(np.float32) * np.ones((n, k), np.float32)
    x = np.stack((np.ones(k), -np.ones(k))).astype(np.float32)
    packed = pack_quantized(weight, target.panel_columns, W8)
    # The lowest number, too, which rounding to nearest never gives.
    packed["numbers"][packed["numbers"] == 1] = 0
    numbers, scale = quantize_activation(x)
    for tile in (1, target.row_tile):
        arrays = {
            "x": pack_quantized_activation(numbers, scale, tile, sums_of(W8)),
            "w": packed["numbers"],
            "scale": packed["scale"],
            "y": np.zeros((2, n), np.float32),
        }
        y = run(linear_quant_spec(n, k, tile, "i8", W8), target, arrays, written=("y",), scalars={0: 2})["y"]
        expected = (numbers * scale.astype(np.float64)[:, None]) @ unpack_quantized(packed, n, k, W8).value().T
        np.testing.assert_allclose(y, expected, rtol=1e-6)


def test_levels_have_the_same_bits() -> None:
    """Of int8 activations; a level is a choice of instructions, and integer sums are exact."""
    n, k = 40, 200
    weight, x = random(n, k, seed=1), random(3, k)
    numbers, scale = quantize_activation(x)
    results = []
    for target in LEVELS:
        packed = pack_quantized(weight, target.panel_columns, W4_64Z)
        arrays = {"x": pack_quantized_activation(numbers, scale, 1, sums_of(W4_64Z)), "w": packed["numbers"]}
        arrays |= {"scale": packed["scale"], "zero": packed["zero"], "y": np.zeros((3, n), np.float32)}
        spec = linear_quant_spec(n, k, 1, "i8", W4_64Z)
        results.append(run(spec, target, arrays, written=("y",), scalars={0: 3})["y"])
    assert all(same_bits(y, results[0]) for y in results)


@pytest.mark.parametrize(("name", "instruction"), [("icelake-server", "vpdpbusd"), ("x86-64-v4", "vpmaddwd")])
def test_targets_use_their_dot_instruction(name: str, instruction: str) -> None:
    target = TARGETS[name]
    code = llvm_text(build_kernel(linear_quant_spec(96, 64, target.row_tile, "i8", W8), target), target, "asm")
    assert code.count(instruction) >= target.row_tile * target.panel_columns // 16
    assert "vpmaddubsw" not in code


def test_a_layout_that_does_not_exist_is_refused() -> None:
    for format, words in ((Integers(3), "no reader knows weights of .*'bits': 3"), (Integers(4, 12), "have no layout")):
        with pytest.raises(KernelSpecError, match=words):
            build_kernel(linear_quant_spec(16, 64, 1, "i8", format), NATIVE)
    with pytest.raises(KernelSpecError, match="weights of steps are not multiplied by activations of f32"):
        build_kernel(linear_quant_spec(16, 64, 1, "f32", STEPS), NATIVE)
    with pytest.raises(KernelSpecError, match="may overflow; at most 131072"):
        build_kernel(linear_quant_spec(16, 131073, 1, "i8", W8), NATIVE)


@pytest.mark.parametrize("target", LEVELS[1:-1], ids=lambda t: t.name)
def test_levels_between_have_the_kernels_of_the_highest(target: Target) -> None:
    """Where tables are read and rows become int8, so these kernels run there rarely; linear layers have others."""
    for table in TABLES:
        params = {"dim": 66, "vocab": 515, "panel_columns": NATIVE.panel_columns, **table.kernel_params()}
        spec = KernelSpec.of("embedding", "embedding_quant", **params)
        assert build_kernel(spec, target).script() == build_kernel(spec, NATIVE).script()
    for act in NUMPY:
        params = {"dim": 66, "row_tile": NATIVE.row_tile, "act_dtype": act, "rows": 0, **sum_params(W4_32)}
        spec = KernelSpec.of("other", "quantize_rows", **params)
        assert build_kernel(spec, target).script() == build_kernel(spec, NATIVE).script()


# --- int8 activations ----------------------------------------------------------------------------------------------


def rows_of(packed: NDArray[np.int32], rows: int) -> NDArray[np.int32]:
    """The words of each row of a packed int8 activation."""
    return packed.transpose(0, 2, 1).reshape(-1, packed.shape[1])[:rows]


@spread(
    "dim, format, act",
    LEVELS,
    [(66, W8), (66, W4_32), (172, W4), (7, W8), (200, W8), (304, W4)],
    list(NUMPY),
    ids=name_of,
)
def test_quantize_rows(target: Target, act: str, dim: int, format: WeightFormat) -> None:
    rows = 11
    x = random(rows, dim)
    x[3], x[4] = 0, 1e-42
    x = x.astype(NUMPY[act])
    groups = format.groups(dim)
    for tile in {1, target.row_tile}:
        expected = pack_quantized_activation(*quantize_activation(x.astype(np.float32)), tile, sums_of(format))
        assert expected.shape[1] == quantized_row_words(dim, groups)
        spec = KernelSpec.of(
            "other", "quantize_rows", dim=dim, row_tile=tile, act_dtype=act, rows=0, **sum_params(format)
        )
        for tasks in (1, 3):
            arrays = {"x": pack_activation(x, tile), "out": np.full(expected.shape, -1, np.int32)}
            out = run(spec, target, arrays, written=("out",), scalars={0: rows}, num_tasks=tasks)["out"]
            assert same_bits(rows_of(out, rows), rows_of(expected, rows))


@pytest.mark.parametrize("tile", [1, 8])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_no_number_does_not_get_lost(bad: float, tile: int) -> None:
    x = random(2, 40)
    x[1, 33] = bad
    spec = KernelSpec.of("other", "quantize_rows", dim=40, row_tile=tile, act_dtype="f32", rows=0, **sum_params(W8))
    out = np.zeros((2 // min(tile, 2), quantized_row_words(40, 1), tile), np.int32)
    arrays = {"x": pack_activation(x, tile), "out": out}
    words = rows_of(run(spec, NATIVE, arrays, written=("out",), scalars={0: 2})["out"], 2)
    scale = words[:, 10].view(np.float32)
    assert np.isfinite(scale[0])
    assert not np.isfinite(scale[1])


@on_levels
@pytest.mark.parametrize(("dim", "format"), [(66, W8), (172, W4_32)], ids=name_of)
def test_rows_become_int8(target: Target, dim: int, format: WeightFormat) -> None:
    rows = 11
    part, weight = random(rows, dim), random(dim, seed=1)
    wide = part.astype(np.float64)
    norm = wide / np.sqrt((wide**2).mean(1, keepdims=True) + 1e-6) * weight
    cases: dict[str, tuple[NDArray[Any], dict[str, NDArray[Any]], dict[str, float | str]]] = {
        "rms_norm": (norm, {"x": part, "weight": weight}, {"eps": 1e-6, "act_dtype": "i8"}),
    }
    for op, (value, inputs, params) in cases.items():
        first = None
        for tile in {1, target.row_tile}:
            spec = KernelSpec.of("norm", op, dim=dim, row_tile=tile, rows=0, **sum_params(format), **params)
            shape = (-(-rows // tile), quantized_row_words(dim, format.groups(dim)), tile)
            for tasks in (1, 3):
                arrays = {**inputs, "out": np.full(shape, -1, np.int32)}
                out = run(spec, target, arrays, written=("out",), scalars={0: rows}, num_tasks=tasks)["out"]
                found = rows_of(out, rows)
                first = found if first is None else first
                assert same_bits(found, first), op
        assert first is not None
        words = -(-dim // 8) * 2
        numbers = np.ascontiguousarray(first[:, :words]).view(np.int8)
        scale = np.ascontiguousarray(first[:, words]).view(np.float32)
        np.testing.assert_allclose(scale, np.abs(value).max(1) / 127, rtol=1e-5)
        assert (numbers[:, dim:] == 0).all()
        # Half a step, and a little for values that are computed in float32.
        assert (np.abs(numbers[:, :dim] * scale[:, None] - value) <= 0.501 * scale[:, None]).all()
        sums = pack_quantized_activation(numbers[:, :dim], scale, 1, sums_of(format))[:, words + 1 :, 0]
        assert same_bits(first[:, words + 1 :], sums)


def random_numbers(format: WeightFormat, n: int, k: int) -> Quantized:
    """Any numbers, and scales of half precision, as checkpoints have them: values are float32 with every bit."""
    rng = np.random.default_rng((n, k))
    found = Quantized.empty(format, n, k)
    found.numbers[...] = rng.integers(0, 1 << format.bits, (n, k))
    if format.kind == "fp8":
        found.numbers[found.numbers & 127 == 127] = 0  # no numbers
    for plane in found.planes.values():
        if plane.dtype == np.float32:
            plane[...] = rng.standard_normal(plane.shape).astype(np.float16)
        elif format.kind == "steps":
            # (number − zero) · step is an int8.
            plane[...] = rng.integers(1, 9, plane.shape) + 16 * rng.integers(0, 16, plane.shape)
        else:
            plane[...] = rng.integers(0, 250, plane.shape) % (
                16 if (format.kind, format.bits) == ("integers", 4) else 256
            )
    return found


TABLES = [
    W8, W8_32Z, W5, W4_32, W4_ROW, W4_64Z, STEPS_32, STEPSZ, Fp8(), Fp8(32), Codes("nf4", 64), Codes("e2m1", 32, E8M0),
    Codes("e2m1", 16), Affine(4, 32), Affine(6, 16, offsets=False), Affine(4, 16, offsets=False), Q5_1,
    Codes("iq4_nl", 32), Affine(4, 32, offsets=False, table="iq4_nl"),
]  # fmt: skip
"""Of every kind of format, with one scale a row and several, zero points, offsets, blocks."""


# Of every table on the highest level; on the lowest, and in panels of several vectors, of every fourth.
WIDE_PANELS = replace(LEVELS[-1], panel_columns=48)
LOOKED_UP = [
    case if target is LEVELS[0] or (i % 4 == 0 and target in (LEVELS[-1], WIDE_PANELS)) else rare(*case)
    for target in (*LEVELS, WIDE_PANELS)
    for i, case in enumerate((target, table) for table in TABLES)
]


@pytest.mark.parametrize(
    ("target", "table"), LOOKED_UP, ids=lambda v: str(v.panel_columns) if isinstance(v, Target) else str(v)
)
def test_embedding_quant(target: Target, table: WeightFormat) -> None:
    """Rows are what numbers stand for, bit for bit in float32 but for the sign of a zero, and shared with a linear."""
    vocab, rows = 515, 19
    ids = np.random.default_rng(1).integers(0, vocab, rows).astype(np.int32)
    ids[:2] = 0, vocab - 1
    ids[2:4] = -5, vocab + 7  # of some row of the table
    for dim in (66, 640):
        wanted = random_numbers(table, vocab, dim)
        packed = pack_rows(wanted, target.panel_columns)
        spec = KernelSpec.of(
            "embedding",
            "embedding_quant",
            dim=dim,
            vocab=vocab,
            panel_columns=target.panel_columns,
            **table.kernel_params(),
        )
        arrays = {{"numbers": "weight"}.get(name, name): array for name, array in packed.items()}
        arrays = {"ids": ids, **arrays, "out": np.full((rows, dim), np.nan, np.float32)}
        expected = wanted.value()[np.clip(ids[:-2], 0, vocab - 1)].astype(np.float32)
        for tasks in (1, 3):
            out = run(spec, target, arrays, written=("out",), scalars={0: rows - 2}, num_tasks=tasks)["out"]
            assert np.array_equal(out[:-2], expected)
            assert np.isnan(out[-2:]).all()
        # As the part of a vocabulary that begins with token 100.
        arrays = {**arrays, "first": np.array([100], np.float32), "ids": ids + np.int32(100)}
        arrays["ids"][5] = 99
        part = KernelSpec.of("embedding", "embedding_quant", **spec.as_dict(), first=True)
        out = run(part, target, arrays, written=("out",), scalars={0: rows - 2}, num_tasks=3)["out"]
        others = np.isin(np.arange(rows - 2), (2, 3, 5))
        assert np.array_equal(out[:-2][~others], expected[~others])
        assert (out[:-2][others].view(np.int32) == np.iinfo(np.int32).min).all()


def test_every_kind_of_format_is_a_table() -> None:
    assert {table.kind for table in TABLES} == set(FORMATS)
