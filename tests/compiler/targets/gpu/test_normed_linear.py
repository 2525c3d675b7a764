"""Linear layers that norm their row of x: the bits are those of `rms_norm` and the layer, one after the other."""

from __future__ import annotations

import ctypes
import mmap
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from llmc.compiler.kernel_spec import KernelSpec, Param
from llmc.compiler.ops.normed import normed_spec
from llmc.compiler.targets.gpu import cuda_prelude, linear_forms
from llmc.compiler.targets.gpu.cuda import cuda_text
from llmc.compiler.targets.gpu.launch import launch_of
from llmc.compiler.targets.gpu.linear_forms import SHARED_BYTES, few_forms
from llmc.compiler.targets.gpu.normed import norms_inside
from llmc.compiler.targets.gpu.nvcc import build_cubin, build_ptx, find_nvcc
from llmc.compiler.targets.gpu.tensor_cores import ITEMS, tensor_layer
from llmc.compiler.targets.gpu.wgmma import ALL, MANY, OFF
from llmc.models.sources.gguf.stored import LAYOUTS
from llmc.quantize.formats.affine import Affine
from llmc.quantize.formats.codes import E8M0, Codes
from llmc.quantize.formats.fp8 import Fp8
from llmc.quantize.formats.integers import Integers
from llmc.quantize.formats.registry import format_of_kernel

from support.cuda import host_library
from support.ptx_flow import early_operands
from support.sass import find_nvdisasm, instructions
from support.tensor_layers import TORCH, Layer, call_at, call_kernel, expert_spec, float_spec, quantized_spec, run_layer

_EPS = 1e-5
_NVFP4 = Codes("e2m1", 16)
_JOINED = Affine(6, 16, scale_kind="f16")
"""What Q4_K and Q6_K are held in, where they become parts of one matrix."""
_SPECS = {
    "least": float_spec("bf16", 64, 40),
    "96": float_spec("f16", 96, 72, bias=True),
    "512": float_spec("bf16", 512, 136, bias=True, residual=True),
    "768": quantized_spec("bf16", 768, 72, Integers(8)),
    "1056": float_spec("f16", 1056, 40, residual=True),
    "4096": quantized_spec("bf16", 4096, 136, Integers(4, 128)),
    "4128": float_spec("bf16", 4128, 2 * 24, gated="bf16"),
    "8192": quantized_spec("f16", 8192, 40, Integers(8, 64, True)),
    "gated": quantized_spec("bf16", 1280, 2 * 72, Integers(4, 32, True), gated="f32"),
    "activated": KernelSpec.of("linear", "linear", **float_spec("f16", 224, 40, bias=True).as_dict(), activated="f16",
                               activation="gelu_tanh"),
    "w8a8 least": quantized_spec("i8", 64, 40, Integers(8)),
    "w8a8": quantized_spec("i8", 1088, 136, Integers(8), bias=True, residual=True),
    "w8a8 4096": quantized_spec("i8", 4096, 2 * 72, Integers(8), gated="bf16"),
    "w8a8 half groups": quantized_spec("i8", 960, 136, Integers(8, 256)),
    "w4a8": quantized_spec("i8", 1280, 136, Integers(4, 128, True), gated="f32"),
    "w4a8 8192": quantized_spec("i8", 8192, 40, Integers(4, 128)),
    "fp8": quantized_spec("f16", 2080, 72, Fp8()),
    "mxfp4": quantized_spec("bf16", 1056, 72, Codes("e2m1", 32, E8M0), bias=True),
    "Q4_K": quantized_spec("bf16", 1280, 136, LAYOUTS["Q4_K"], bias=True, residual=True),
    "Q4_K gated": quantized_spec("f16", 512, 2 * 72, LAYOUTS["Q4_K"], gated="f32"),
    "Q5_K": quantized_spec("f16", 768, 72, LAYOUTS["Q5_K"]),
    "Q6_K": quantized_spec("bf16", 1280, 72, LAYOUTS["Q6_K"], bias=True),
    "Q6_K gated": quantized_spec("f16", 256, 2 * 72, LAYOUTS["Q6_K"], gated="f16"),
    "Q3_K": quantized_spec("f16", 512, 72, LAYOUTS["Q3_K"], residual=True),
    "Q2_K": quantized_spec("bf16", 512, 72, LAYOUTS["Q2_K"]),
    "Q2_K gated": quantized_spec("bf16", 1024, 2 * 72, LAYOUTS["Q2_K"], gated="bf16"),
    "IQ4_XS": quantized_spec("f16", 512, 136, LAYOUTS["IQ4_XS"]),
    "nvfp4": quantized_spec("bf16", 1056, 72, _NVFP4),
    "nvfp4 gated": quantized_spec("f16", 544, 2 * 72, _NVFP4, gated="f32"),
    "Q4_K and Q6_K": quantized_spec("bf16", 4096, 40, _JOINED),
}  # fmt: skip
"""By the width of a row, which decides how many chains a sum of squares has, or by what else there is."""
_EVERY_TIME = {
    "least", "768", "4096", "4128", "8192", "w8a8", "w8a8 4096", "w4a8", "mxfp4", "Q4_K", "Q6_K", "Q2_K gated",
    "nvfp4 gated",
}  # fmt: skip
_PLACES = {"Q4_K": 5, "Q6_K": 3, "Q2_K gated": 3, "nvfp4 gated": 1}
"""Groups that a GPU runs at a time, so that fewer warps divide K; as many as there are for other layers."""


def _norm(spec: KernelSpec, **more: Param) -> KernelSpec:
    """The norm whose row a layer reads."""
    p = spec.as_dict()
    given: dict[str, Param] = {"dim": p["k"], "act_dtype": p["act_dtype"], "eps": _EPS, "rows": 0}
    if p["act_dtype"] == "i8":
        sums = format_of_kernel(p).sums
        assert sums is not None
        given |= {"group_size": sums.group_size, "sum_factor": sums.factor}
    return KernelSpec.of("norm", "rms_norm", **{**given, **more})


@pytest.fixture(scope="module")
def library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The kernels of what is tested now: building them takes longer than running them."""
    tested = [item.callspec.params.get("name") for item in request.session.items if hasattr(item, "callspec")]
    texts = {}
    for name, spec in _SPECS.items():
        if name not in (*tested, "4096"):
            continue
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(linear_forms, "PLACES", _PLACES.get(name, linear_forms.PLACES))
            for made in (spec, _norm(spec), normed_spec(spec, _EPS)):
                texts[made.symbol()] = cuda_text(made)
    return ctypes.CDLL(str(host_library(list(texts.values()), tmp_path_factory.mktemp("kernels"))))


@pytest.mark.parametrize(
    "name",
    [name if name in _EVERY_TIME else pytest.param(name, marks=pytest.mark.exhaustive) for name in _SPECS],
)
@pytest.mark.parametrize("numbers", ["some", "large", "no number"])
def test_bits_are_those_of_both_kernels(name: str, numbers: str, library: ctypes.CDLL) -> None:
    """In any number of groups. With no rows, nothing is written."""
    spec, random = _SPECS[name], np.random.default_rng(3)
    p, layer = spec.as_dict(), Layer(spec, 1)
    x = (3 * random.standard_normal((1, layer.k))).astype(np.float32)
    weight = random.standard_normal(layer.k).astype(np.float32)
    if numbers == "large":
        x[0, ::7] *= np.float32(3e19)  # squares of which are infinite
    elif numbers == "no number":
        x[0, 5] = np.nan
    layer.x = np.zeros_like(layer.x)
    call_kernel(library, _norm(spec), [x, weight, layer.x], 1, 1)
    half = p["gated"] or p.get("activated")
    width, dtype = layer.n // (2 if p["gated"] else 1), np.int16 if half in TORCH else np.float32
    optional = [array for of, array in (("bias", layer.bias), ("residual", layer.residual)) if p.get(of)]

    def run(of: KernelSpec, given: np.ndarray, *norm: np.ndarray, groups: int, rows: int = 1) -> np.ndarray:
        out = np.full((2, width), 77, dtype)
        call_kernel(library, of, [given, *layer.weights, *optional, *norm, out], rows, groups)
        assert (out[rows:] == 77).all()
        return out[:rows]

    def as_floats(found: np.ndarray) -> np.ndarray:
        return torch.from_numpy(found).view(TORCH[str(half)]).float().numpy() if half in TORCH else found

    expected = run(spec, layer.x, groups=2)
    assert np.isnan(as_floats(expected)).all() == (numbers == "no number")
    for groups in (1, 3, 50):
        found = run(normed_spec(spec, _EPS), x, weight, groups=groups)
        if numbers == "no number":  # products keep none of its bits
            assert np.isnan(as_floats(found)).all()
        else:
            assert np.array_equal(found.view(np.uint8), expected.view(np.uint8))
    run(normed_spec(spec, _EPS), x, weight, groups=2, rows=0)


def test_nothing_is_read_behind_the_row(library: ctypes.CDLL) -> None:
    """Row and norm's weight end where a page ends, behind which nobody may read."""
    spec = _SPECS["4096"]
    layer, out = Layer(spec, 1), np.zeros(136, np.float32)
    size = 4 * layer.k
    places, kept = [], []
    for _ in range(2):
        memory = mmap.mmap(-1, size + mmap.PAGESIZE)
        first = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(first + size), mmap.PAGESIZE, 0) == 0
        np.frombuffer(memory, np.float32, layer.k)[:] = 1.0
        places.append(first)
        kept.append(memory)
    weights = [one.ctypes.data for one in layer.weights]
    call_at(library, normed_spec(spec, _EPS), [places[0], *weights, places[1], out.ctypes.data], 1, 3)
    ones = np.full((1, layer.k), 0x3F80, np.int16)  # of bf16
    layer.x = ones
    assert np.array_equal(out, run_layer(library, spec, layer, 1, 1)[0])


def test_which_layers_norm() -> None:
    """Those whose groups all run at once and still have enough in flight; no other way of computing a row."""
    int4, mxfp4 = Integers(4, 128), Codes("e2m1", 32, E8M0)
    norming = (
        float_spec("bf16", 4096, 6144), float_spec("f16", 4096, 2 * 14336, "f16"), float_spec("bf16", 64, 96),
        quantized_spec("bf16", 4096, 6144, int4), quantized_spec("bf16", 4096, 2 * 14336, int4, "bf16"),
        quantized_spec("f16", 4096, 6144, Integers(8), bias=True), quantized_spec("bf16", 8192, 10240, int4),
        float_spec("bf16", 896, 1152, bias=True), quantized_spec("i8", 4096, 6144, Integers(8)),
        quantized_spec("i8", 4096, 2 * 14336, int4, "bf16"), quantized_spec("bf16", 4096, 6144, _JOINED),
        quantized_spec("f16", 4096, 6144, LAYOUTS["Q6_K"]), quantized_spec("bf16", 4096, 2 * 14336, _NVFP4, "bf16"),
        quantized_spec("bf16", 4096, 2 * 14336, LAYOUTS["Q4_K"], "bf16"),
    )  # fmt: skip
    others = (
        float_spec("bf16", 4096, 128256),  # groups take turns
        float_spec("bf16", 16384, 6144),  # the row leaves no room for a ring
        quantized_spec("bf16", 4096, 6144, mxfp4),  # nor do sums of groups of 32 beside it
        quantized_spec("bf16", 4096, 2 * 14336, LAYOUTS["Q6_K"], "bf16"),  # nor spans of bytes
        float_spec("f32", 4096, 6144), float_spec("bf16", 4104, 6144),  # not on tensor cores
        quantized_spec("i8", 96, 6144, Integers(8)), expert_spec(float_spec("bf16", 2048, 1536)),
    )  # fmt: skip
    assert [norms_inside(_norm(spec), spec, OFF) for spec in norming] == [True] * len(norming)
    assert [norms_inside(_norm(spec), spec, OFF) for spec in others] == [False] * len(others)
    spec = norming[0]
    assert norms_inside(_norm(spec), spec, MANY)
    assert not norms_inside(_norm(spec), spec, ALL)  # its products may have other bits
    assert not norms_inside(_norm(spec, rows=2), spec, OFF)
    assert not norms_inside(_norm(spec, act_dtype="i8"), spec, OFF)
    assert not norms_inside(_norm(spec, other=True), spec, OFF)
    short = norming[-1]
    assert norms_inside(_norm(short), short, ALL)  # which mma.sync computes with any option
    of_int8 = next(spec for spec in norming if spec.as_dict()["act_dtype"] == "i8")
    assert not norms_inside(_norm(of_int8, group_size=64), of_int8, OFF)
    for one in norming:
        made = normed_spec(one, _EPS)
        layer, plain = tensor_layer(made), tensor_layer(one)
        assert layer is not None
        assert plain is not None
        (form,) = few_forms(layer)
        assert form.shared_bytes + 4 * ITEMS * (3 if layer.dtype == "i8" else 1) <= SHARED_BYTES
        assert form.columns == few_forms(plain)[0].columns
        assert launch_of(made, tensor_cores=True).groups == launch_of(one, tensor_cores=True).groups


_WIDE = [
    quantized_spec("bf16", 4096, 6144, Integers(4, 128, True), bias=True),
    float_spec("bf16", 4096, 2 * 14336, "bf16"),
    float_spec("f16", 8192, 10240),
    quantized_spec("f16", 4096, 6144, Integers(8)),
    quantized_spec("i8", 4096, 2 * 14336, Integers(4, 128), "bf16"),
    quantized_spec("i8", 8192, 10240, Integers(8)),
    quantized_spec("bf16", 4096, 2 * 14336, LAYOUTS["Q4_K"], "bf16"),
    quantized_spec("bf16", 4096, 6144, _JOINED),
    quantized_spec("f16", 8192, 8192, LAYOUTS["Q6_K"]),
    quantized_spec("bf16", 4096, 6144, LAYOUTS["Q5_K"]),
    quantized_spec("bf16", 4096, 2 * 14336, LAYOUTS["Q3_K"], "bf16"),
    quantized_spec("bf16", 4096, 2 * 14336, LAYOUTS["Q2_K"], "bf16"),
    quantized_spec("f16", 8192, 10240, LAYOUTS["IQ4_XS"]),
    quantized_spec("bf16", 4096, 2 * 14336, _NVFP4, "bf16"),
]
"""As models have them."""


@pytest.mark.skipif(find_nvcc() is None, reason="no nvcc here")
@pytest.mark.parametrize(
    "specs", [[_WIDE[0], _WIDE[6]], pytest.param(_WIDE, marks=pytest.mark.exhaustive)], ids=["some", "all"]
)
def test_code_has_no_spills_and_waits_before_it_reads_the_row(specs: list[KernelSpec], tmp_path: Path) -> None:
    """Only weights are read before a kernel waits, on every path. Rows are read 64 bits at a time, or 128 for int8."""
    made = {one.symbol(): one for one in (normed_spec(spec, _EPS) for spec in specs)}
    early = "\n".join((cuda_prelude.FULL_DEPENDENT, *(cuda_text(one, dependent=True) for one in made.values())))
    for kernel in build_ptx(early, "compute_90").decode().split(".visible .entry ")[1:]:
        p = made[kernel.split("(")[0]].as_dict()
        planes = [plane.name for plane in format_of_kernel(p).planes(int(p["k"]))] if "format" in p else []
        names = ["x", "weight", *planes, *(["bias"] if p["bias"] else []), "norm", "out", "scalars"]
        assert early_operands(kernel, names) == {"weight", "norm", "scalars"}
    ptx = build_ptx("\n".join((cuda_prelude.FULL, *map(cuda_text, made.values()))), "compute_80")
    # Each operation says how it rounds.
    assert not re.search(rb"\t(add|mul|div|mad|sqrt)\.f(32|64)|\.ftz|\.approx", ptx)
    for architecture in ("sm_80", "sm_90a", "sm_100"):
        cubin, said = build_cubin(ptx, architecture)
        assert re.findall(r"(\d+) bytes spill", said) == ["0"] * (2 * len(made)), architecture
        if find_nvdisasm() is None:
            continue
        for symbol, counts in instructions(cubin, tmp_path).items():
            p = made[symbol].as_dict()
            at_once = 4 if p["act_dtype"] == "i8" else 2
            loads = sum(n for name, n in counts.items() if name.startswith(f"LDG.E.{32 * at_once}"))
            layer = tensor_layer(made[symbol])
            assert layer is not None
            of_rows = 2 * int(p["k"]) // (at_once * ITEMS)
            # Scales of short groups are read in as wide parts.
            assert loads >= of_rows if layer.short else loads == of_rows, symbol
            assert counts["SHFL.BFLY"] in (5, 10, 15)
            assert not [name for name in counts if name.startswith(("LDL", "STL"))]
