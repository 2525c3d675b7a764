"""Linear layers by tensor cores whose scale groups have a product or a step: GGUF's blocks, and NVFP4."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from llmc.compiler.kernel_spec import KernelSpec
from llmc.compiler.targets.gpu import cuda_prelude, linear_forms, wgmma
from llmc.compiler.targets.gpu.cuda import cuda_text
from llmc.compiler.targets.gpu.nvcc import build_cubin, build_ptx, find_nvcc
from llmc.compiler.targets.gpu.tensor_cores import refusal, tensor_layer
from llmc.compiler.targets.registry import resolve_target
from llmc.models.sources.gguf.stored import LAYOUTS
from llmc.quantize.formats.affine import Affine
from llmc.quantize.formats.codes import Codes
from llmc.quantize.formats.tables import TABLES

from support.cuda import host_library
from support.sass import find_nvdisasm, instructions
from support.tensor_layers import (
    EXPERTS,
    ORDER,
    TOP_K,
    TORCH,
    Layer,
    check_numbers,
    check_rows,
    expert_spec,
    index_of,
    layer_texts,
    quantized_spec,
    run_layer,
)

_ROWS = (1, 2, 8, 9, 16, 17, 64, 65, 130)
_NVFP4 = Codes("e2m1", 16)
_JOINED = Affine(8, 16, 32, scale_kind="f32")
"""What blocks of several types are held in, where they become parts of one matrix."""
_SPECS = {
    "Q4_K": quantized_spec("bf16", 768, 200, LAYOUTS["Q4_K"], bias=True, residual=True),
    "Q4_K-gated": quantized_spec("f16", 512, 2 * 72, LAYOUTS["Q4_K"], gated="f32"),
    "Q6_K": quantized_spec("bf16", 512, 136, LAYOUTS["Q6_K"]),
    "Q6_K-gated": quantized_spec("f16", 256, 2 * 72, LAYOUTS["Q6_K"], gated="f16"),
    "Q5_K": quantized_spec("bf16", 256, 136, LAYOUTS["Q5_K"]),
    "Q4_1": quantized_spec("bf16", 416, 72, LAYOUTS["Q4_1"]),
    "Q5_1": quantized_spec("f16", 96, 72, LAYOUTS["Q5_1"]),
    "IQ4_NL": quantized_spec("bf16", 672, 72, Codes("iq4_nl", 32, "f16")),
    "IQ4_XS": quantized_spec("f16", 512, 136, LAYOUTS["IQ4_XS"]),
    "Q3_K": quantized_spec("bf16", 512, 72, LAYOUTS["Q3_K"]),
    "Q2_K": quantized_spec("bf16", 1280, 2 * 72, LAYOUTS["Q2_K"], gated="bf16"),
    "nvfp4": quantized_spec("f16", 544, 136, _NVFP4),
    "nvfp4-spans": quantized_spec("bf16", 256, 72, _NVFP4),
    "joined": quantized_spec("bf16", 288, 72, _JOINED),
    "joined-gated": quantized_spec("f16", 288, 2 * 72, _JOINED, gated="f16"),
}
_EXPERT_SPECS = {
    "Q4_K-experts": expert_spec(quantized_spec("bf16", 256, 2 * 24, LAYOUTS["Q4_K"], gated="bf16")),
    "Q6_K-experts": expert_spec(quantized_spec("f16", 256, 40, LAYOUTS["Q6_K"], bias=True)),
}
_PLACES = {"Q4_K-gated": 1, "Q6_K": 5, "Q3_K": 3, "nvfp4": 1, "joined-gated": 1, "Q6_K-experts": 1}
"""Groups that a GPU runs at a time, so that groups have more columns; as many as there are for other layers."""
_CONVERT = """\
extern "C" __global__ void __launch_bounds__(32, 1) convert(uint* bf16, uint* f16, uint* packed) {
  for (int i = 0; i < 2; ++i) llmc_iq4_nl_bf16(bf16 + 4 * i, packed[i]), llmc_iq4_nl_f16(f16 + 4 * i, packed[i]);
}
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    texts = [_CONVERT, cuda_text(ORDER)]
    texts += layer_texts({**_SPECS, **_EXPERT_SPECS}, _PLACES)
    return ctypes.CDLL(str(host_library(texts, tmp_path_factory.mktemp("kernels"))))


@pytest.mark.parametrize("name", list(_SPECS))
def test_layers_are_those_of_torch_with_the_same_bits_for_every_number_of_rows(name: str, library: ctypes.CDLL) -> None:
    check_rows(library, _SPECS[name], _ROWS)


@pytest.mark.parametrize("name", list(_EXPERT_SPECS))
def test_rows_of_experts_have_the_same_bits_in_any_company(name: str, library: ctypes.CDLL) -> None:
    spec = _EXPERT_SPECS[name]
    liking = np.random.default_rng(3).standard_normal((73, EXPERTS)) - 2.0 * np.arange(EXPERTS)
    ids = np.argsort(-liking, 1)[:, :TOP_K].astype(np.int32)
    layer = Layer(spec, ids.size, ids.ravel())
    whole = run_layer(library, spec, layer, ids.size, 3, index_of(library, ids, 3))
    check_numbers(spec, whole, layer.expected)
    for tokens in (1, 20):
        some = run_layer(library, spec, layer, tokens * TOP_K, 5, index_of(library, ids[:tokens], 1))
        assert np.array_equal(some, whole[: tokens * TOP_K])


def test_halves_have_every_number_of_the_table(library: ctypes.CDLL) -> None:
    packed = (np.arange(16, dtype=np.uint8)[0::2] | np.arange(16, dtype=np.uint8)[1::2] << 4).astype(np.uint8)
    found: dict[str, np.ndarray] = {dtype: np.zeros(16, np.int16) for dtype in TORCH}
    given = [ctypes.c_void_p(one.ctypes.data) for one in (*found.values(), packed)]
    library.run_convert((ctypes.c_void_p * 3)(*(ctypes.addressof(one) for one in given)), 1, 1)
    for dtype, halves in found.items():
        assert torch.from_numpy(halves).view(TORCH[dtype]).float().tolist() == TABLES["iq4_nl"].tolist()


def test_forms_fit_shared_memory_and_warps_divide_spans() -> None:
    found = {}
    for name, spec in (*_SPECS.items(), *_EXPERT_SPECS.items()):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(linear_forms, "PLACES", _PLACES.get(name, linear_forms.PLACES))
            layer = tensor_layer(spec)
            assert layer is not None
            forms = wgmma.row_forms(layer, wgmma.ALL)
            assert forms == wgmma.row_forms(layer, wgmma.OFF)  # their sums wait for each step
            assert forms.shared_bytes(layer) <= linear_forms.SHARED_BYTES
            assert all(form.stages >= 3 for form in forms.few)
            assert all(form.stages(layer) >= 3 for form in forms.many)
            found[name] = [(form.units, form.splits) for form in forms.few]
    assert found["Q4_K"] == [(1, 4)] * 2
    assert found["Q4_K-gated"] == [(4, 1)] * 2
    assert found["Q6_K"] == [(2, 2)] * 2


def test_what_is_said_of_such_layers() -> None:
    specs = (_SPECS["Q4_K"], quantized_spec("bf16", 128, 64, Affine(4, 64)), quantized_spec("f32", 512, 64, _JOINED))
    assert [refusal(spec) for spec in specs] == [
        None,
        "scale groups of 64 numbers of format affine are neither of 16 nor of 32",
        "activations are f32, and tensor cores multiply bf16, f16 and int8",
    ]
    assert resolve_target("cuda:sm_90a").notes(specs[:1]) == ()
    assert resolve_target("cuda:sm_80,sm_90a+wgmma").notes(specs[:1]) == (
        "1 kernel of linear layers by mma.sync alone, and not by wgmma: scale groups of less than 64 numbers with "
        "steps, offsets, or codes whose scale is no power of two",
    )


_WIDE = (4096, 4096)
_BUILT = {
    "Q4_K": quantized_spec("bf16", *_WIDE, LAYOUTS["Q4_K"], bias=True, residual=True),
    "Q6_K": quantized_spec("bf16", *_WIDE, LAYOUTS["Q6_K"]),
    "Q4_K-gated": quantized_spec("bf16", 4096, 28672, LAYOUTS["Q4_K"], gated="bf16"),
    "Q4_K-experts": expert_spec(quantized_spec("bf16", 2048, 1536, LAYOUTS["Q4_K"], gated="bf16")),
    "Q6_K-gated": quantized_spec("f16", 4096, 28672, LAYOUTS["Q6_K"], gated="f16"),
    "Q5_K": quantized_spec("bf16", *_WIDE, LAYOUTS["Q5_K"]),
    "Q4_1": quantized_spec("bf16", *_WIDE, LAYOUTS["Q4_1"]),
    "IQ4_XS": quantized_spec("bf16", *_WIDE, LAYOUTS["IQ4_XS"]),
    "Q3_K": quantized_spec("bf16", *_WIDE, LAYOUTS["Q3_K"]),
    "Q2_K": quantized_spec("bf16", *_WIDE, LAYOUTS["Q2_K"]),
    "Q2_K-gated": quantized_spec("bf16", 4096, 28672, LAYOUTS["Q2_K"], gated="bf16"),
    "nvfp4-gated": quantized_spec("bf16", 4096, 28672, _NVFP4, gated="bf16"),
    "Q4_K and Q6_K": quantized_spec("bf16", 4096, 6144, Affine(6, 16, scale_kind="f16")),
    "joined": quantized_spec("bf16", 4096, 6144, _JOINED),
}


@pytest.mark.slow
@pytest.mark.skipif(find_nvcc() is None, reason="no nvcc here")
@pytest.mark.parametrize("names", [("Q4_K", "Q6_K"), pytest.param(tuple(_BUILT)[2:], marks=pytest.mark.exhaustive)])
def test_code_has_tensor_cores_wide_copies_and_no_spills(names: tuple[str, ...], tmp_path: Path) -> None:
    wanted: dict[str, KernelSpec] = {name: _BUILT[name] for name in names}
    ptx = build_ptx("\n".join((cuda_prelude.FULL, *map(cuda_text, wanted.values()))), "compute_80")
    kernels = {one.split("(")[0]: one for one in ptx.decode().split(".visible .entry ")[1:]}
    for spec in wanted.values():
        text = kernels[spec.symbol()]
        assert len(re.findall(r"mma\.sync\.aligned\.m16n8k16\.row\.col\.f32", text)) >= 16
        assert len(re.findall(r"cp\.async\.cg\.shared\.global\.L2::128B .*, 16;", text)) >= 3
        assert not re.findall(r"(ld|st)\.local", text)
    for architecture in ("sm_80", "sm_90a", "sm_100"):
        cubin, said = build_cubin(ptx, architecture)
        assert re.findall(r"(\d+) bytes spill", said) == ["0"] * (2 * len(wanted)), architecture
        if find_nvdisasm() is None:
            continue
        machine_code = instructions(cubin, tmp_path)
        for name, spec in wanted.items():
            counts = machine_code[spec.symbol()]
            assert sum(n for one, n in counts.items() if one.startswith("HMMA.16816.F32")) >= 16, (architecture, name)
            assert counts["LDGSTS.E.BYPASS.LTC128B.128"] >= 3
            assert not [one for one in counts if one.startswith(("LDL", "STL"))]
