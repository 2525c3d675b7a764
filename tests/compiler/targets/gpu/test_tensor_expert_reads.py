"""What tensor cores read of experts' weights: each page of an expert in use once a step of 16 tokens."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from llmc.compiler.kernel_spec import KernelSpec, Param
from llmc.compiler.ops.experts import index_ints
from llmc.compiler.targets.gpu.cuda import cuda_text
from llmc.compiler.targets.gpu.linear_forms import FEW_ROWS
from llmc.quantize.formats.integers import Integers

from support.cuda import host_library
from support.page_watch import PAGE_BYTES, WatchedArrays, built
from support.tensor_layers import call_at

EXPERTS, TOP_K, K, N = 6, 2, 512, 256
CACHE_PAGES = 32
"""128 KiB, and an expert has 256 of bf16."""
OF_EXPERTS: dict[str, Param] = {"experts": EXPERTS, "top_k": TOP_K}
ORDER = KernelSpec.of("other", "expert_order", row_unit=16, rows=0, some=False, **OF_EXPERTS)
FLOATS: dict[str, Param] = {"k": K, "n": N, "act_dtype": "bf16", "bias": False}
SPECS = {
    "bf16": KernelSpec.of("linear", "expert_linear", weight_dtype="bf16", gated="bf16", **FLOATS, **OF_EXPERTS),
    "w8a16": KernelSpec.of(
        "linear", "expert_linear_quant", gated="", **FLOATS, **OF_EXPERTS, **Integers(8).kernel_params()
    ),
}


@pytest.mark.exhaustive  # compiling the kernels for the host takes longest
@pytest.mark.parametrize("name", SPECS)
def test_a_step_reads_each_expert_in_use_once(name: str, tmp_path: Path) -> None:
    spec, random = SPECS[name], np.random.default_rng(4)
    library = ctypes.CDLL(str(host_library([cuda_text(ORDER), cuda_text(spec)], tmp_path)))
    of_number = 2 if name == "bf16" else 1
    expert_pages = N * K * of_number // PAGE_BYTES
    arrays = WatchedArrays(built(tmp_path), {"w": np.zeros(EXPERTS * expert_pages * PAGE_BYTES, np.uint8)})
    scale, out = np.ones(EXPERTS * N, np.float32), np.zeros((FEW_ROWS * TOP_K, N), np.float32)
    for tokens in (2, FEW_ROWS):
        # The last expert but one is nobody's.
        liking = random.standard_normal((tokens, EXPERTS))
        liking[:, -2] = -100.0
        ids = np.argsort(-liking, 1)[:, :TOP_K].astype(np.int32)
        chosen = np.concatenate([ids, np.zeros_like(ids)], 1)
        index = np.zeros(index_ints(EXPERTS, ids.size), np.int32)
        call_at(library, ORDER, [chosen.ctypes.data, index.ctypes.data], tokens, 1)
        x: NDArray[np.int16] = np.zeros((ids.size, K), np.int16)
        planes = [scale.ctypes.data] if name == "w8a16" else []
        with arrays.watched(CACHE_PAGES):
            places = [x.ctypes.data, arrays.addresses["w"], *planes, index.ctypes.data, out.ctypes.data]
            call_at(library, spec, places, ids.size, 5)
        in_use = np.isin(np.arange(EXPERTS), ids)
        assert not in_use.all()
        assert np.array_equal(arrays.fetches["w"], np.repeat(in_use, expert_pages))
