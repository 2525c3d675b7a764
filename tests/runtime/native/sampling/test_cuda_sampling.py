"""Tokens that a CUDA device draws are the host's, bit for bit, of a vocabulary of several pieces."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmc.runtime.binding import Artifact

from support.compiled import compile_tiny
from support.cuda import Stub, fake_nvcc, kernels_on_host, stub_library
from support.drawing import answers
from support.tiny_models import make_tiny_model


def test_the_device_draws_what_the_host_draws(
    tmp_path: Path, kernel_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_tiny_model(tmp_path / "model", "llama", vocab_size=9001, num_hidden_layers=1)
    ladder = "prefill=[1]x[16],decode=[8]x[128],mixed=[8]x[24]"
    with fake_nvcc(tmp_path):
        compile_tiny(model, tmp_path / "out", kernel_cache, target="cuda:sm_80", buckets=ladder, dtype="f32").close()
    stub = Stub(stub_library(tmp_path))
    monkeypatch.setenv("STUB_CUDA_KERNELS", str(kernels_on_host(tmp_path / "out", tmp_path)))
    monkeypatch.setenv("LLMC_CUDA_LIBRARY", str(stub.library))
    with Artifact(tmp_path / "out") as artifact:
        expected, of_host = answers(artifact, device_sampling=False)
        found, of_device = answers(artifact)
    assert found == expected
    assert (of_host["drawn_on_device"], of_host["drawn_on_host"]) == (0, 0)
    assert 0 < of_device["drawn_on_host"] < of_device["drawn_on_device"]
    assert stub.report() == ""
