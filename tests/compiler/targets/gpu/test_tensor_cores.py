"""Linear layers by tensor cores, on the host: fragments as the PTX manual has them, copies as late as they may come."""

from __future__ import annotations

import ctypes
import itertools
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from llmc.adapter_slot import AdapterSlot, padded
from llmc.compiler.kernel_spec import KernelSpec
from llmc.compiler.ops.adapters import adapter_spec, shrunk_width
from llmc.compiler.ops.experts import index_ints
from llmc.compiler.targets.gpu import cuda_prelude, linear_forms
from llmc.compiler.targets.gpu.cuda import CudaTarget, cuda_text
from llmc.compiler.targets.gpu.launch import launch_of
from llmc.compiler.targets.gpu.linear_forms import FEW_ROWS, few_forms
from llmc.compiler.targets.gpu.nvcc import build_cubin, build_ptx, find_nvcc
from llmc.compiler.targets.gpu.tensor_cores import refusal, shrinks_on_tensor_cores, tensor_layer
from llmc.compiler.targets.registry import resolve_target
from llmc.graphs_format import TILE_RECORD, TILE_ROWS
from llmc.models.activations import activated
from llmc.quantize.formats.codes import E8M0, Codes
from llmc.quantize.formats.fp8 import VALUES, Fp8
from llmc.quantize.formats.integers import Integers
from llmc.quantize.formats.steps import Steps
from llmc.quantize.formats.tables import TABLES

from support.adapter_pools import NUMBERS, slot_bytes, tiles_of
from support.cuda import host_library
from support.sass import find_nvdisasm, instructions
from support.tensor_layers import (
    EXPERTS,
    ORDER,
    TOP_K,
    TORCH,
    Layer,
    call_kernel,
    check_numbers,
    check_rows,
    expert_spec,
    float_spec,
    index_of,
    layer_texts,
    quantized_spec,
    run_layer,
)

_ROWS = (1, FEW_ROWS // 2, FEW_ROWS // 2 + 1, FEW_ROWS + 1, 67)


_SPECS = {
    "bf16": float_spec("bf16", 2080, 200, bias=True, residual=True),
    "f16-gated": float_spec("f16", 96, 2 * 72, gated="f16"),
    "w8a8": quantized_spec("i8", 1088, 136, Integers(8), residual=True),
    "w8a8-half-groups": quantized_spec("i8", 960, 136, Integers(8, 256)),
    "w4a8-groups-zeros": quantized_spec("i8", 1280, 136, Integers(4, 128, True), gated="f32"),
    "w4a16-groups": quantized_spec("bf16", 672, 136, Integers(4, 32), bias=True),
    "w4a16-odd-groups-zeros": quantized_spec("bf16", 416, 2 * 72, Integers(4, 96, True), gated="f32"),
    "fp8": quantized_spec("f16", 672, 72, Fp8()),
    "mxfp4": quantized_spec("bf16", 416, 72, Codes("e2m1", 32, E8M0), bias=True),
    "w8a16-zeros": quantized_spec("f16", 1184, 136, Integers(8, 64, True)),
}
_EXPERT_SPECS = {
    "bf16-gated": expert_spec(float_spec("bf16", 96, 2 * 24, gated="bf16", bias=True)),
    "w8a8-experts": expert_spec(quantized_spec("i8", 192, 40, Integers(8))),
    "mxfp4-gated": expert_spec(quantized_spec("f16", 96, 2 * 24, Codes("e2m1", 32, E8M0), gated="f32")),
    "w4a16-groups-zeros": expert_spec(quantized_spec("f16", 160, 136, Integers(4, 32, True), bias=True)),
}
_PLACES = {
    "f16-gated": 1,
    "w8a8-half-groups": 1,
    "w4a8-groups-zeros": 3,
    "w4a16-odd-groups-zeros": 1,
    "w8a8-experts": 2,
    "w4a16-groups-zeros": 1,
}
"""Groups that a GPU runs at a time, so that groups have more columns; as many as there are for other layers."""


_ADAPTED: tuple[int, tuple[int, ...], int] = (160, (24, 5, 40), 21)
"""Columns, rows of parts, and rank of a layer with adapters."""


def _adapter_specs(dtype: str) -> tuple[KernelSpec, KernelSpec]:
    slot = CudaTarget(("sm_80",)).adapter_slot(*_ADAPTED, dtype)
    return adapter_spec("adapter_shrink", slot, act_dtype=dtype), adapter_spec("adapter_expand", slot, act_dtype=dtype)


_ADAPTED_EXPERTS: tuple[int, tuple[int, ...], int] = (96, (24, 5), 21)
"""Columns, rows of parts, and rank of a layer of experts with adapters."""


def _adapted_experts() -> tuple[AdapterSlot, KernelSpec, KernelSpec, KernelSpec]:
    """The slot of a layer of experts, and its kernels."""
    columns, rows, rank = _ADAPTED_EXPERTS
    of_all = tuple(EXPERTS * padded(count) for count in rows)
    slot = CudaTarget(("sm_80",)).adapter_slot(EXPERTS * padded(columns), of_all, rank, "bf16")
    of_experts = {"experts": EXPERTS, "top_k": TOP_K, "act_dtype": "bf16"}
    pairs = KernelSpec.of("other", "adapter_pairs", tile_rows=TILE_ROWS, experts=EXPERTS, top_k=TOP_K, rows=0)
    shrink, expand = (adapter_spec(f"adapter_{op}", slot, columns, rows, **of_experts) for op in ("shrink", "expand"))
    return slot, pairs, shrink, expand


_CONVERT = """\
extern "C" __global__ void __launch_bounds__(32, 1) convert(uint* bf16, uint* f16, uint* packed, int e2m1) {
  for (int i = 0; i < (e2m1 ? 2 : 64); ++i) {
    if (e2m1) llmc_e2m1_bf16(bf16 + 4 * i, packed[i]), llmc_e2m1_f16(f16 + 4 * i, packed[i]);
    else llmc_e4m3_bf16(bf16 + 2 * i, packed[i]), llmc_e4m3_f16(f16 + 2 * i, packed[i]);
  }
}
"""
"""Numbers of a weight in both types of halves."""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    adapters = [spec for dtype in TORCH for spec in _adapter_specs(dtype)]
    texts = [_CONVERT, *(cuda_text(spec) for spec in (ORDER, *adapters, *_adapted_experts()[1:]))]
    texts += layer_texts({**_SPECS, **_EXPERT_SPECS}, _PLACES)
    return ctypes.CDLL(str(host_library(texts, tmp_path_factory.mktemp("kernels"))))


@pytest.mark.parametrize("name", list(_SPECS))
def test_layers_are_those_of_torch_with_the_same_bits_for_every_number_of_rows(name: str, library: ctypes.CDLL) -> None:
    check_rows(library, _SPECS[name], _ROWS)


@pytest.mark.parametrize("name", ["e4m3", "e2m1"])
def test_halves_have_every_float_of_a_weight(name: str, library: ctypes.CDLL) -> None:
    if name == "e2m1":
        expected = np.asarray(TABLES["e2m1"])
        packed = (np.arange(16, dtype=np.uint8)[0::2] | np.arange(16, dtype=np.uint8)[1::2] << 4).astype(np.uint8)
    else:
        # Weights have no NaN; their codes continue the others.
        expected, packed = VALUES.copy(), np.arange(256, dtype=np.uint8)
        expected[127], expected[255] = 480, -480
    found: dict[str, np.ndarray] = {dtype: np.zeros(len(expected), np.int16) for dtype in TORCH}
    given: list[Any] = [ctypes.c_void_p(one.ctypes.data) for one in found.values()]
    given += [ctypes.c_void_p(packed.ctypes.data)]
    given.append(ctypes.c_int32(name == "e2m1"))
    library.run_convert((ctypes.c_void_p * 4)(*(ctypes.addressof(one) for one in given)), 1, 1)
    for dtype, halves in found.items():
        wide = torch.from_numpy(halves).view(TORCH[dtype]).float().numpy()
        assert np.array_equal(wide.view(np.int32), expected.view(np.int32)), dtype


def test_groups_have_columns_for_every_place_of_a_gpu() -> None:
    """And warps divide a unit where bits allow it; what a warp reads ahead stays within its registers."""
    found = {}
    for name, spec in (*_SPECS.items(), *_EXPERT_SPECS.items()):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(linear_forms, "PLACES", _PLACES.get(name, linear_forms.PLACES))
            layer = tensor_layer(spec)
            assert layer is not None
            form, of_more = few_forms(layer)
            found[name] = form.units, form.splits
            assert form.stages >= 3
            assert of_more.stages >= 3
            assert max(form.shared_bytes, of_more.shared_bytes) <= linear_forms.SHARED_BYTES
    assert found == {
        "bf16": (1, 1),
        "f16-gated": (4, 1),
        "w8a8": (1, 4),
        "w8a8-half-groups": (4, 1),
        "w4a8-groups-zeros": (2, 2),
        "w4a16-groups": (1, 4),
        "w4a16-odd-groups-zeros": (4, 1),
        "fp8": (1, 1),
        "mxfp4": (1, 4),
        "w8a16-zeros": (1, 4),
        "bf16-gated": (1, 1),
        "w8a8-experts": (4, 1),
        "mxfp4-gated": (1, 4),
        "w4a16-groups-zeros": (4, 1),
    }


def test_pairs_are_listed_by_expert(library: ctypes.CDLL) -> None:
    ids = np.random.default_rng(3).integers(0, EXPERTS + 1, (50, TOP_K), np.int32)
    index, pairs = index_of(library, ids, 3), ids.size
    assert index[0] == pairs
    assert np.array_equal(index[1 : 1 + pairs], np.minimum(ids.ravel(), EXPERTS - 1))
    starts = index[1 + 2 * pairs :][: EXPERTS + 1]
    for expert, (first, end) in enumerate(itertools.pairwise(starts)):
        assert sorted(index[1 + pairs + first : 1 + pairs + end]) == list(np.flatnonzero(ids.ravel() == expert))


@pytest.mark.parametrize("name", list(_EXPERT_SPECS))
def test_rows_of_experts_have_the_same_bits_in_any_company(name: str, library: ctypes.CDLL) -> None:
    """Of an expert with several tiles of many rows, of those with few, and of one with none."""
    spec, random = _EXPERT_SPECS[name], np.random.default_rng(3)
    assert tensor_layer(spec) is not None
    liking = random.standard_normal((73, EXPERTS)) - 2.0 * np.arange(EXPERTS)
    liking[:, -2] = -100.0
    ids = np.argsort(-liking, 1)[:, :TOP_K].astype(np.int32)
    layer = Layer(spec, ids.size, ids.ravel())
    whole = run_layer(library, spec, layer, ids.size, 3, index_of(library, ids, 3))
    check_numbers(spec, whole, layer.expected)
    for tokens in (1, 2, 20):
        some = run_layer(library, spec, layer, tokens * TOP_K, 5, index_of(library, ids[:tokens], 1))
        assert np.array_equal(some, whole[: tokens * TOP_K])
    # Rows of experts that another rank holds are left alone.
    ids[1, 2] = EXPERTS
    some = run_layer(library, spec, layer, 2 * TOP_K, 2, index_of(library, ids[:2], 2))
    assert np.array_equal(some[:-1], whole[: 2 * TOP_K - 1])
    assert (some[-1] == 77).all()


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_rows_of_adapters_have_the_same_bits_in_any_tile(dtype: str, library: ctypes.CDLL) -> None:
    """Parts with ranks of their own, one without an adapter, and tiles of every number of rows."""
    shrink, expand = _adapter_specs(dtype)
    slot, random = CudaTarget(("sm_80",)).adapter_slot(*_ADAPTED, dtype), np.random.default_rng(5)
    columns, parts, _ = _ADAPTED
    count, n, width = 21, sum(parts), shrunk_width(slot)

    def floats(*shape: int) -> np.ndarray:
        return random.standard_normal(shape).astype(NUMBERS[dtype]).astype(np.float32)

    ranks = {0: (21, 3, 16), 2: (0, 17, 0)}
    slots = {
        number: {p: (floats(r, columns), floats(parts[p], r), 0.5 + p) for p, r in enumerate(of_parts) if r}
        for number, of_parts in ranks.items()
    }
    pool = np.concatenate([slot_bytes(slot, slots.get(i, {}), dtype) for i in range(3)])
    x, y = floats(count, columns), floats(count, n)

    def run(tiles: np.ndarray, groups: int) -> np.ndarray:
        shrunk, out = np.full((count, width), np.nan, np.float32), y.copy()
        call_kernel(library, shrink, [x.astype(NUMBERS[dtype]), tiles, pool, shrunk], count, groups)
        call_kernel(library, expand, [shrunk, tiles, pool, out], count, groups)
        return out

    order = [int(i) for i in random.permutation(count)]
    of_slot = {0: order[:13], 2: order[13:20]}
    expected = y.astype(np.float64)
    for number, rows in of_slot.items():
        for part, (a, b, scale) in slots[number].items():
            first = sum(parts[:part])
            made = scale * (x[rows].astype(np.float64) @ a.T.astype(np.float64)) @ b.T.astype(np.float64)
            expected[rows, first : first + parts[part]] += made
    whole = run(tiles_of(of_slot, count), 3)
    np.testing.assert_allclose(whole, expected, rtol=1e-4, atol=1e-3)
    for number, rows in of_slot.items():
        alone = run(tiles_of({number: rows[2:3]}, count), 1)
        np.testing.assert_array_equal(alone[rows[2]], whole[rows[2]])
        np.testing.assert_array_equal(np.delete(alone, rows[2], 0), np.delete(y, rows[2], 0))


def test_rows_of_experts_read_the_matrices_of_their_expert(library: ctypes.CDLL) -> None:
    """Rows are pairs of a token and an expert; those of tokens without an adapter stay."""
    slot, pairs, shrink, expand = _adapted_experts()
    assert shrinks_on_tensor_cores(shrink)
    (columns, parts, rank), random, count = _ADAPTED_EXPERTS, np.random.default_rng(6), 11

    def floats(*shape: int) -> np.ndarray:
        return random.standard_normal(shape).astype(NUMBERS["bf16"]).astype(np.float32)

    a = [floats(rank, EXPERTS, columns) for _ in parts]
    b = [floats(EXPERTS, padded(n), rank) for n in parts]
    joined = {i: (a[i].reshape(rank, -1), b[i].reshape(-1, rank), 0.5) for i in range(len(parts))}
    pool = np.concatenate([slot_bytes(slot, of_slot, "bf16") for of_slot in ({}, joined)])
    x, y = floats(count * TOP_K, columns), floats(count * TOP_K, sum(parts))
    experts = np.array([random.permutation(EXPERTS)[:TOP_K] for _ in range(count)], np.int32)
    rows, expected = [7, 2, 9, 0, 3, 4, 10, 1, 5], y.astype(np.float64)
    for pair in (row * TOP_K + j for row in rows for j in range(TOP_K)):
        expert, shrunk = experts.ravel()[pair], [x[pair] @ of[:, experts.ravel()[pair]].T for of in a]
        made = [0.5 * b[i][expert, :n].astype(np.float64) @ shrunk[i] for i, n in enumerate(parts)]
        expected[pair] += np.concatenate(made)
    chosen = np.ascontiguousarray(np.concatenate((experts, np.zeros_like(experts)), axis=1))

    def run(tiles: np.ndarray, groups: int) -> np.ndarray:
        of_pairs = np.full(1 + TILE_RECORD * TILE_ROWS * TOP_K * count, -1, np.int32)
        shrunk, out = np.full((len(x), shrunk_width(slot)), np.nan, np.float32), y.copy()
        index = np.zeros(index_ints(EXPERTS, len(x)), np.int32)
        call_kernel(library, pairs, [tiles, chosen, index, of_pairs], count, groups)
        call_kernel(library, shrink, [x.astype(NUMBERS["bf16"]), index, of_pairs, pool, shrunk], count, groups)
        call_kernel(library, expand, [shrunk, of_pairs, pool, out], count, groups)
        return out

    whole = run(tiles_of({1: rows}, count), 3)
    np.testing.assert_allclose(whole, expected, rtol=1e-4, atol=1e-3)
    alone, those = run(tiles_of({1: rows[4:5]}, count), 1), slice(rows[4] * TOP_K, (rows[4] + 1) * TOP_K)
    np.testing.assert_array_equal(alone[those], whole[those])
    np.testing.assert_array_equal(np.delete(alone, those, 0), np.delete(y, those, 0))
    np.testing.assert_array_equal(run(tiles_of({}, count), 2), y)


def test_an_activation_without_a_gate(tmp_path: Path) -> None:
    given: dict[str, Any] = {"activated": "f32", "activation": "gelu_tanh"}
    spec = float_spec("bf16", 96, 136, bias=True, **given)
    layer, rows = Layer(spec, max(_ROWS)), max(_ROWS)
    found = run_layer(ctypes.CDLL(str(host_library([cuda_text(spec)], tmp_path))), spec, layer, rows, groups=3)
    expected = activated(torch.from_numpy(layer.expected), "gelu_tanh").numpy()
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_what_tensor_cores_do_not_take() -> None:
    unfit = (
        float_spec("f32", 64, 64),
        float_spec("bf16", 72, 64),
        quantized_spec("i8", 96, 64, Integers(8)),
        quantized_spec("i8", 128, 64, Integers(4, 32)),
        quantized_spec("bf16", 128, 64, Codes("e2m1", 16, E8M0)),
        quantized_spec("bf16", 128, 64, Codes("nf4", 64)),
        quantized_spec("f32", 128, 64, Fp8()),
    )
    assert [tensor_layer(spec) for spec in unfit] == [None] * len(unfit)
    assert all(launch_of(spec, tensor_cores=True) == launch_of(spec) for spec in unfit)


def test_why_tensor_cores_do_not_take_a_layer() -> None:
    """Said of a compiled model, once for each reason; of other kernels, nothing."""
    f32, groups = float_spec("f32", 64, 64), quantized_spec("bf16", 128, 64, Codes("e2m1", 16, E8M0))
    mixed = KernelSpec.of("linear", "linear", **{**f32.as_dict(), "act_dtype": "bf16"})
    specs = (
        ORDER, float_spec("bf16", 64, 64), float_spec("bf16", 72, 64), f32, quantized_spec("f32", 128, 64, Fp8()),
        groups, mixed, quantized_spec("i8", 128, 64, Steps(64)), quantized_spec("i8", 1 << 17, 64, Integers(8)),
        quantized_spec("bf16", 128, 64, Codes("nf4", 64)), quantized_spec("i8", 128, 64, Fp8()),
    )  # fmt: skip
    assert [refusal(spec) is None for spec in specs] == [True, True] + [False] * (len(specs) - 2)
    target = resolve_target("cuda:sm_90a+wgmma")
    many, one = "2 kernels of linear layers not on tensor cores", "1 kernel of linear layers not on tensor cores"
    assert sorted(target.notes(specs)) == sorted(
        f"{how}, nor by wgmma: {why}"
        for how, why in (
            (one, "131072 products of int8 behind one scale may be too large for a 32-bit sum"),
            (one, "72 columns are no multiple of the 32 that are multiplied at a time"),
            (one, "activations are int8, and weights of format fp8 are no integers"),
            (many, "activations are f32, and tensor cores multiply bf16, f16 and int8"),
            (one, "scale groups of 16 numbers are no multiple of the 32 that are multiplied at a time"),
            (one, "tensor cores have no kernel for weights of format codes (nf4)"),
            (one, "tensor cores have no kernel for weights of format steps"),
            (one, "the weight is f32 and activations are bf16, which tensor cores do not mix"),
        )
    )
    assert resolve_target("cuda:sm_80").notes(specs[2:3]) == (
        f"{one}: 72 columns are no multiple of the 32 that are multiplied at a time",
    )
    assert target.notes(specs[:2]) == resolve_target("opencl").notes(specs) == ()


def _count(text: bytes, pattern: str) -> int:
    return len(re.findall(pattern.encode(), text))


@pytest.mark.slow
@pytest.mark.skipif(find_nvcc() is None, reason="no nvcc here")
def test_code_has_tensor_cores_wide_loads_and_no_spills(tmp_path: Path) -> None:
    """Of layers as wide as models have them, for each generation: its PTX, and its machine code where nvdisasm is."""
    wide = (4096, 4096)
    wanted: dict[KernelSpec, tuple[str, str, int]] = {
        float_spec("bf16", *wide, bias=True, residual=True): ("f32.bf16.bf16.f32", "HMMA.16816.F32.BF16", 20),
        float_spec("f16", *wide): ("f32.f16.f16.f32", "HMMA.16816.F32", 20),
        float_spec("f16", *wide, gated="f16"): ("f32.f16.f16.f32", "HMMA.16816.F32", 24),
        quantized_spec("i8", *wide, Integers(8)): ("s32.u8.s8.s32", "IMMA.16832.U8.S8", 8),
        quantized_spec("i8", *wide, Integers(4, 128, True)): ("s32.u8.s8.s32", "IMMA.16832.U8.S8", 0),
        quantized_spec("bf16", *wide, Integers(4, 128, True)): ("f32.bf16.bf16.f32", "HMMA.16816.F32.BF16", 4),
        quantized_spec("bf16", *wide, Codes("e2m1", 32, E8M0)): (
            "f32.bf16.bf16.f32",
            "HMMA.16816.F32.BF16",
            4,
        ),
        expert_spec(float_spec("bf16", 2048, 1536, gated="bf16")): ("f32.bf16.bf16.f32", "HMMA.16816.F32.BF16", 20),
    }
    """And how many loads of 128 bits there are without shared memory."""
    ptx = build_ptx("\n".join((cuda_prelude.FULL, *map(cuda_text, wanted))), "compute_80")
    kernels = ptx.split(b".visible .entry ")[1:]
    assert len(kernels) == len(wanted)
    for spec, (kind, _, loads) in wanted.items():
        text = next(one for one in kernels if one.startswith(spec.symbol().encode()))
        assert _count(text, rf"mma\.sync\.aligned\.m16n8k(16|32)\.row\.col\.{kind}") >= 16
        assert _count(text, r"cp\.async\.cg\.shared\.global\.L2::128B .*, 16;") >= 3
        assert _count(text, r"ld\.shared\.v4") >= 4
        assert _count(text, r"ld\.global(\.nc)?\.v4") >= loads
        assert not _count(text, r"(ld|st)\.local")
    for architecture in ("sm_80", "sm_90a", "sm_100"):
        cubin, said = build_cubin(ptx, architecture)
        spills = re.findall(r"(\d+) bytes spill", said)
        assert spills == ["0"] * (2 * len(wanted)), architecture
        if find_nvdisasm() is None:
            continue
        machine_code = instructions(cubin, tmp_path)
        for spec, (_, product, loads) in wanted.items():
            counts = machine_code[spec.symbol()]
            assert counts[product] >= 16, (architecture, spec.symbol())
            assert counts["LDGSTS.E.BYPASS.LTC128B.128"] >= 3
            assert counts["LDS.128"] >= 4
            assert sum(n for name, n in counts.items() if name.startswith("LDG.E.128")) >= loads
            assert not [name for name in counts if name.startswith(("LDL", "STL"))]
