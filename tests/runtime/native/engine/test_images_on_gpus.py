"""Images on devices of GPUs: patches go from the host to the tower, and its rows to the text model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from llmc.compiler.config import CompileConfig
from llmc.compiler.images import compile_with_images
from llmc.runtime.binding import Artifact

from support.cuda import Stub, fake_nvcc, kernels_on_host, stub_library
from support.marks import rare
from support.opencl import needs_opencl, program_cache
from support.seen_images import check_placed, check_rows
from support.towers import make_seeing

pytestmark = pytest.mark.native
LADDER = "prefill=[1,2]x[16],decode=[1,2]x[64],mixed=[2]x[16]"


def compiled(root: Path, family: str, target: str, cache: Path, **fields: Any) -> tuple[Path, Path, Path]:
    """(model, text model, tower)."""
    model = make_seeing(root / "model", family, **fields)
    config = CompileConfig(
        model, root / "m.llmc", target=target, cache_dir=cache, jobs=1, tokenizer="none", dtype="f32", block_size=16,
        buckets=LADDER,
    )  # fmt: skip
    text, tower = compile_with_images(config)
    return model, text.artifact, tower.artifact


@needs_opencl
@pytest.mark.parametrize(
    "family", [rare("smolvlm"), rare("idefics3"), "mistral3", rare("qwen2_vl"), rare("qwen3_5"), "qwen3_vl"]
)
def test_images_on_opencl(
    family: str, kernel_cache: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    options = {"num_threads": 0, "program_cache": program_cache(tmp_path_factory)}
    model, *made = compiled(tmp_path, family, "opencl", kernel_cache)
    text, tower = map(Artifact, made)
    with text, tower:
        check_rows(family, model, tower, 1e-5, **options)
        check_placed(family, model, text, tower, **options)


def test_images_on_cuda(kernel_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every call of the driver is checked."""
    (tmp_path / "nvcc").mkdir()
    with fake_nvcc(tmp_path / "nvcc"):
        model, *made = compiled(tmp_path, "mistral3", "cuda:sm_80", kernel_cache, num_hidden_layers=1)
    stub_library(tmp_path)
    kernels_on_host(made[0], tmp_path, made[1])
    monkeypatch.setenv("STUB_CUDA_KERNELS", str(tmp_path / "kernels.so"))
    monkeypatch.setenv("LLMC_CUDA_LIBRARY", str(tmp_path / "libstub_cuda.so"))
    stub, (text, tower) = Stub(tmp_path / "libstub_cuda.so"), map(Artifact, made)
    with text, tower:
        check_rows("mistral3", model, tower, 1e-5)
        check_placed("mistral3", model, text, tower)
    assert stub.report() == ""
