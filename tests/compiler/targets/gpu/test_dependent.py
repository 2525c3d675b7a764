"""Kernels that begin while the one before them ends: what they touch before they wait, and how they are launched."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

import numpy as np
import pytest

from llmc.compiler.kernel_spec import KernelSpec
from llmc.compiler.ops.normed import normed_spec
from llmc.compiler.targets.base import TargetError
from llmc.compiler.targets.gpu.cuda import CudaTarget, cuda_text
from llmc.compiler.targets.gpu.cuda_images import awaits, joined, pack
from llmc.compiler.targets.gpu.cuda_prelude import FULL_DEPENDENT
from llmc.compiler.targets.gpu.cuda_wgmma import WGMMA
from llmc.compiler.targets.gpu.nvcc import build_cubin, build_ptx, find_nvcc
from llmc.compiler.targets.gpu.wgmma import ARCHITECTURE, WAYS
from llmc.compiler.targets.registry import resolve_target, target_of
from llmc.cuda_code import CUBIN, PTX, Image, unpack
from llmc.quantize.formats.integers import Integers

from support.cuda import host_library, pointers
from support.paged_attention import attention_params, merge_params
from support.ptx_flow import early_operands
from support.sass import find_nvdisasm, listings
from support.tensor_layers import call_kernel, expert_spec, float_spec, quantized_spec

_K, _N = 192, 72


_NORM = KernelSpec.of("norm", "rms_norm", dim=_K, act_dtype="bf16", eps=1e-5, rows=0)
_GATHER = KernelSpec.of("gather", "gather_rows", dim=_K)
_LAYERS = {
    "bf16": float_spec("bf16", _K, _N, bias=True, residual=True),
    "w4a16": quantized_spec("bf16", _K, _N, Integers(4, 32, True), bias=True, residual=True),
    "w8a8": quantized_spec("i8", _K, _N, Integers(8), bias=True, residual=True),
}
_NORMED = normed_spec(_LAYERS["w4a16"], 1e-5)
_BYTES = {"ushort": 2, "float": 4, "int": 4, "uint": 4, "uchar": 1}


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    texts = [cuda_text(spec, dependent=True) for spec in (*_LAYERS.values(), _NORM, _NORMED)]
    found = ctypes.CDLL(str(host_library(texts, tmp_path_factory.mktemp("kernels"))))
    found.cuda_on_host_late.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    return found


@pytest.mark.parametrize("name", [*_LAYERS, "rms_norm", "normed"])
def test_nothing_that_kernels_write_is_touched_before_a_kernel_waits(name: str, library: ctypes.CDLL) -> None:
    """Rows of x, the residual and the result have other contents until all items of a group wait, and again for the
    next group. Bits are those of a run that finds all of it there. With no rows at all, groups wait, too."""
    spec, random = {**_LAYERS, "normed": _NORMED}.get(name, _NORM), np.random.default_rng(5)
    operands = pointers(cuda_text(spec, dependent=True))[:-1]

    def numbers(of: str, count: int) -> np.ndarray:
        floats = random.standard_normal(count).astype(np.float32)
        if of == "float":
            return floats
        if of == "ushort":
            return (floats.view(np.uint32) >> 16).astype(np.uint16)
        return random.integers(0, 100, count).astype({"int": np.int32, "uchar": np.uint8}[of])

    for rows in (0, 1) if spec is _NORMED else (0, 1, 9, 40, 70):
        count = 80 * (_K + _N)
        buffers = [numbers(of, count) for of, _, _ in operands]
        out = next(buffer for (_, at, _), buffer in zip(operands, buffers, strict=True) if at == "out")
        found = []
        for late in (False, True):
            out[:] = 77
            if late:
                for (_, at, _), buffer in zip(operands, buffers, strict=True):
                    if at in ("x", "residual", "out"):
                        library.cuda_on_host_late(buffer.ctypes.data, buffer.nbytes)
            call_kernel(library, spec, buffers, rows, groups=3)
            library.cuda_on_host_late(None, 0)
            found.append(out.copy())
        assert np.array_equal(found[0].view(np.uint8), found[1].view(np.uint8))
        assert (found[0].astype(np.float64) != 77).any() == (rows > 0)
    assert library.cuda_on_host_impatient() == 0


def test_only_weights_stay_as_they_are() -> None:
    """All else compilers must read behind the wait, and not by caches that it does not clear."""
    kept = {name for _, name, kept in pointers(cuda_text(_LAYERS["w4a16"], dependent=True)) if kept}
    assert kept == {"weight", "scale", "zero", "bias"}
    assert {name for _, name, kept in pointers(cuda_text(_NORM, dependent=True)) if kept} == {"weight"}
    kept = {name for _, name, kept in pointers(cuda_text(_NORMED, dependent=True)) if kept}
    assert kept == {"weight", "scale", "zero", "bias", "norm"}
    assert not any(kept for *_, kept in pointers(cuda_text(_GATHER, dependent=True)))
    plain = cuda_text(_GATHER)
    assert all(kept for *_, kept in pointers(plain))
    assert "llmc_await_earlier" not in plain


_WIDE = attention_params(32, 8, 128, "bf16", "bf16", 128, 0)
_DENSE = [
    quantized_spec("bf16", 4096, 4096, Integers(4, 128, True), bias=True, residual=True),
    float_spec("bf16", 4096, 4096, bias=True, residual=True),
    quantized_spec("i8", 4096, 4096, Integers(8), bias=True, residual=True),
]
_OTHERS = [
    KernelSpec.of("norm", "rms_norm", dim=4096, act_dtype="bf16", eps=1e-5, rows=0),
    expert_spec(float_spec("bf16", 2048, 1536, bias=True)),
    KernelSpec.of("attention", "paged_attention", **_WIDE, segments=32),
    KernelSpec.of("attention", "rotated_attention", **_WIDE, segments=32, rotary_dim=128, qk_norm=True, norm_eps=1e-6),
    KernelSpec.of("attention", "merge_attention", **merge_params(_WIDE), segments=32),
]
"""As wide as models have them."""


@pytest.mark.skipif(find_nvcc() is None, reason="no nvcc here")
@pytest.mark.parametrize(
    ("specs", "architectures"),
    [
        ([_DENSE[0], _OTHERS[0]], ("sm_90a",)),
        pytest.param([*_DENSE, *_OTHERS], ("sm_90a", "sm_100"), marks=pytest.mark.exhaustive),
    ],
    ids=["some", "all"],
)
def test_code_waits_on_every_path(specs: list[KernelSpec], architectures: tuple[str, ...], tmp_path: Path) -> None:
    """By its PTX. Machine code has both instructions, and no spills."""
    texts = {spec.symbol(): cuda_text(spec, dependent=True) for spec in specs}
    ptx = build_ptx("\n".join((FULL_DEPENDENT, *texts.values())), "compute_90")
    kernels = {one.split("(")[0]: one for one in ptx.decode().split(".visible .entry ")[1:]}
    assert kernels.keys() == texts.keys()
    for spec in specs:
        names = [name for _, name, _ in pointers(texts[spec.symbol()])]
        early = early_operands(kernels[spec.symbol()], names)
        expected = {"weight", "scalars"} if spec in _DENSE else {"weight"} if spec.op == "rms_norm" else set()
        assert early == expected, spec.symbol()
    dense = {spec.symbol() for spec in _DENSE}
    for architecture in architectures:
        cubin, said = build_cubin(ptx, architecture)
        assert set(re.findall(r"(\d+) bytes spill", said)) == {"0"}
        if find_nvdisasm() is None:
            continue
        for symbol, code in listings(cubin, tmp_path).items():
            begin = code.index("ACQBULK")
            assert code.index("PREEXIT") < begin, symbol
            touched = [one for one in code[:begin] if re.match(r"(LDGSTS|LDG|LD|STG|ST|ATOM|RED)\b", one)]
            assert (code.count("ACQBULK") >= 4) if symbol in dense else not touched, symbol


@pytest.mark.exhaustive
@pytest.mark.skipif(find_nvcc() is None, reason="no nvcc here")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("spec", _DENSE[:2], ids=["w4a16", "bf16"])
def test_layers_by_wgmma_wait_on_every_path(way: str, spec: KernelSpec) -> None:
    text = cuda_text(spec, way, dependent=True)
    ptx = build_ptx("\n".join((FULL_DEPENDENT, WGMMA, text)), f"compute_{ARCHITECTURE[3:]}")
    names = [name for _, name, _ in pointers(text)]
    assert early_operands(ptx.decode().split(".visible .entry ")[1], names) == {"weight", "scalars"}


@pytest.mark.exhaustive
@pytest.mark.skipif(find_nvcc() is None or find_nvdisasm() is None, reason="no nvcc or nvdisasm here")
def test_only_code_of_newer_gpus_waits(tmp_path: Path) -> None:
    target = resolve_target("cuda:sm_80,sm_90a,sm_100+dependent")
    images = unpack(target.compile(_NORM, None))
    assert [(one.kind, one.capability) for one in images] == [(CUBIN, 80), (CUBIN, 90), (CUBIN, 100), (PTX, 80)]
    for image in images[:-1]:
        (code,) = listings(image.code, tmp_path).values()
        assert ("ACQBULK" in code) == ("PREEXIT" in code) == (image.capability >= 90)
    assert b"griddepcontrol" not in images[-1].code


def test_a_code_file_says_whether_its_kernels_wait() -> None:
    """In a field that was reserved: an older library reads it, and launches kernels as it did."""
    image = Image(0, CUBIN, 90, False, b"code")
    plain, waiting = pack([image], 1), pack([image], 1, awaits=True)
    assert [awaits(one) for one in (plain, waiting, joined([waiting, waiting]), joined([waiting, plain]))] == [
        False, True, True, False,
    ]  # fmt: skip
    assert unpack(waiting) == unpack(plain) == [image]


def test_names() -> None:
    target = resolve_target("cuda:sm_90,sm_80+dependent")
    assert target == CudaTarget(("sm_80", "sm_90"), ("dependent",))
    assert target.name == "cuda:sm_80,sm_90+dependent"
    assert target_of(target.record()) == target
    with pytest.raises(TargetError, match=r"there is no option 'fast' of CUDA; known are .*dependent"):
        resolve_target("cuda:sm_90+fast")
    with pytest.raises(TargetError, match=r"only GPUs from sm_90 on begin dependent kernels early; name such an arch"):
        resolve_target("cuda:sm_80,sm_89+dependent")
