"""Layers of int8 activations by words of four numbers: exact sums, with and without a device's own instruction."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmc.compiler.kernel_spec import KernelSpec
from llmc.compiler.targets.gpu.cuda import cuda_text
from llmc.compiler.targets.gpu.opencl import PRELUDE, OpenClTarget
from llmc.compiler.targets.gpu.plain_forms import CHAINS
from llmc.compiler.targets.gpu.tensor_cores import tensor_layer
from llmc.compiler.targets.reference.kernels.padding import number_bytes
from llmc.compiler.targets.reference.kernels.rows_int8 import Int8Rows
from llmc.quantize import QuantConfig
from llmc.quantize.formats.base import Quantized, WeightFormat
from llmc.quantize.formats.integers import Integers
from llmc.quantize.formats.steps import Steps
from llmc.runtime.binding import Artifact, Replayer

from support.compiled import Pages, compile_tiny, random_tokens, replay
from support.cuda import host_library
from support.opencl import failing_library, needs_opencl
from support.tensor_layers import call_kernel, quantized_spec
from support.tiny_models import make_tiny_model

_N = 72
_FORMATS: dict[str, tuple[int, WeightFormat, bool]] = {
    "w8a8": (96, Integers(8), True),
    "a row that ends within a stage": (100, Integers(8), True),
    "a row that ends within a word": (98, Integers(8), False),
    "short groups": (104, Integers(8, 8), True),
    "zeros that fit no byte": (96, Integers(8, 32, True), False),
    "4 bits": (96, Integers(4, 32, True), True),
    "w4a8": (96, Steps(32), True),
}
"""Columns, format, and whether words are multiplied."""


def _spec(name: str) -> KernelSpec:
    k, format, _ = _FORMATS[name]
    return quantized_spec("i8", k, _N, format)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The kernels of GPUs without tensor cores for them, on the host."""
    assert all(tensor_layer(_spec(name)) is None for name in _FORMATS)
    texts = [cuda_text(_spec(name)) for name in _FORMATS]
    for name, text in zip(_FORMATS, texts, strict=True):
        assert ("llmc_dot4(" in text) == _FORMATS[name][2], name
    return ctypes.CDLL(str(host_library(texts, tmp_path_factory.mktemp("kernels"))))


@pytest.mark.parametrize("name", list(_FORMATS))
def test_sums_are_exact(name: str, library: ctypes.CDLL) -> None:
    """Bit by bit what integers give that are scaled group by group, also of the largest numbers of both."""
    (k, format, _), random, rows = _FORMATS[name], np.random.default_rng(3), 5
    weight = random.standard_normal((_N, k), dtype=np.float32)
    quantized = Quantized.empty(format, _N, k)
    format.quantize_rows(weight, quantized)
    numbers = random.integers(-127, 128, (rows, k)).astype(np.int8)
    numbers[0], numbers[1] = 127, -127
    whole, scales = _integers(format, quantized, k), quantized.scale.astype(np.float32)
    length = k if scales.shape[1] == 1 else format.group_size
    scale_x = np.abs(random.standard_normal(rows, dtype=np.float32))
    chains = np.zeros((CHAINS, rows, _N), np.float32)
    for group in range(scales.shape[1]):
        part = slice(group * length, (group + 1) * length)
        exact = numbers[:, part].astype(np.int64) @ whole[:, part].T
        chains[group % CHAINS] += exact.astype(np.float32) * scales[:, group]
    while len(chains) > 1:
        chains = chains[::2] + chains[1::2]
    expected = chains[0] * scale_x[:, None]
    out = np.empty((rows, _N), np.float32)
    planes = [np.ascontiguousarray(one) for one in quantized.planes.values()]
    buffers = [_rows(numbers, scale_x, format), _stored(quantized.numbers, format, k), *planes, out]
    call_kernel(library, _spec(name), buffers, rows, groups=2)
    np.testing.assert_array_equal(out.view(np.int32), expected.view(np.int32))


def _integers(format: WeightFormat, quantized: Quantized, k: int) -> np.ndarray:
    """[N, K] numbers before scaling."""
    group = format.group_of(k)
    numbers = quantized.numbers.astype(np.int64)
    if isinstance(format, Steps):
        steps = quantized.planes["step"][:, group].astype(np.int64)
        scaled: np.ndarray = (numbers - (steps >> 4)) * (steps & 15)
        return scaled
    assert isinstance(format, Integers)
    zero = quantized.planes["zero"][:, group].astype(np.int64) if format.asymmetric else np.int64(format.middle)
    whole: np.ndarray = numbers - zero
    return whole


def _stored(numbers: np.ndarray, format: WeightFormat, k: int) -> np.ndarray:
    out = np.zeros((len(numbers), number_bytes(k, format.bits)), np.uint8)
    packed = numbers[:, 0::2] | numbers[:, 1::2] << np.uint8(4) if format.bits == 4 else numbers
    out[:, : packed.shape[1]] = packed
    return out


def _rows(numbers: np.ndarray, scales: np.ndarray, format: WeightFormat) -> np.ndarray:
    rows = Int8Rows(numbers.shape[1], format.groups(numbers.shape[1]))
    out = np.zeros((len(numbers), rows.words), np.int32)
    out.view(np.int8)[:, : numbers.shape[1]] = numbers
    out[:, rows.number_words] = scales.view(np.int32)
    return out


@pytest.mark.skipif(shutil.which("clang-15") is None, reason="no clang of that name here")
def test_the_extension_is_used_where_the_compiler_has_it(tmp_path: Path) -> None:
    source = tmp_path / "kernel.cl"
    source.write_text(PRELUDE + OpenClTarget().text(_spec("w8a8")))
    for target, used in (("spir64", True), ("x86_64", False)):  # clang's headers give SPIR all extensions
        command = ["clang-15", "-x", "cl", "-cl-std=CL3.0", "-target", target, "-Xclang", "-finclude-default-header"]
        done = subprocess.run([*command, "-S", "-emit-llvm", "-O1", "-o", "-", source], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert ("dot_4x8packed_ss_int" in done.stdout) == used


@pytest.mark.slow
@needs_opencl
@pytest.mark.parametrize("scheme", ["w8a8", "w4a8"])
def test_a_model_has_the_same_bits_with_and_without_the_extension(
    scheme: str, tmp_path: Path, kernel_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a device that adds the products in another order, and has them in programs of OpenCL C 3.0 alone."""
    failing = failing_library(tmp_path)
    model = make_tiny_model(tmp_path / "model", "llama", num_hidden_layers=1)
    options: dict[str, Any] = {"buckets": "prefill=[1]x[16],decode=[1]x[32]", "quant": QuantConfig(scheme)}
    compile_tiny(model, tmp_path / "out", kernel_cache, target="opencl", **options).close()
    programs = ctypes.CDLL(str(failing)).failing_opencl_dot_programs
    programs.restype = ctypes.c_uint64
    found = []
    for dot in (0, 1):
        monkeypatch.setenv("FAILING_OPENCL", f"dot={dot}")
        before = programs()
        with Artifact(tmp_path / "out") as artifact:
            tokens, pages = random_tokens(artifact.info.vocab_size, 9), Pages(8, artifact.info.block_size)
            kept: dict[str, Any] = {"opencl_library": str(failing), "program_cache": str(tmp_path / f"programs-{dot}")}
            with Replayer(artifact, num_blocks=8, **kept) as device:
                rows = [replay(device, 0, pages, [(0, tokens[:8], 0)]), replay(device, 1, pages, [(0, tokens[8:], 8)])]
        assert (programs() > before) == bool(dot)
        found.append(np.array(rows).view(np.int32))
    assert np.array_equal(found[0], found[1])
