"""GPU targets against the reference target: `debug diff` is clean for every family, and greedy tokens are the same."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from llmc.models.registry import FAMILIES
from llmc.quantize import QuantConfig
from llmc.runtime.binding import Artifact, Engine, Replayer
from llmc.runtime.debug.diff import diff_artifacts

from support.compiled import Pages, compile_tiny, random_tokens, replay
from support.cuda import Stub, fake_nvcc, kernels_on_host, stub_library
from support.engine_driver import drive, greedy
from support.families import CASES
from support.opencl import needs_opencl, opencl_setting, program_cache
from support.tiny_models import make_tiny_model

_BUCKETS = "prefill=[1]x[32],decode=[1]x[64]"
_FIRST = {family: case for case, (family, _) in reversed(CASES.items()) if FAMILIES[family].generates}


def _apart(families: Iterable[str]) -> list[str]:
    """Families with the same kernels far apart: whichever process meets them later finds what was built."""
    return sorted(families, key=lambda name: (name.endswith("_text"), name))


_LATENT = {
    **CASES["deepseek_v2-lite"][1], "hidden_size": 96, "kv_lora_rank": 32, "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16, "v_head_dim": 16, "moe_intermediate_size": 32,
    "num_experts_per_tok": 8,
}  # fmt: skip
"""Sizes that tensor cores take. A token has all experts, so that none is at the edge of being chosen."""


def check_clean(reference: Path, other: Path, bound: float) -> None:
    """A prompt of 20 tokens, and a step of one of them. bound: of errors, relative to a tensor's largest number."""
    with Artifact(other) as artifact:
        tokens = random_tokens(artifact.info.vocab_size, 20)
    for step in (0, 2):
        found = diff_artifacts(reference, other, tokens, step)
        assert len(found.tensors) > 8
        assert found.first(bound) is None
        assert not found.only_a
        assert not found.only_b


def check_same_tokens(reference: Path, other: Path, bound: float, **options: Any) -> None:
    """A greedy request of 12 tokens gives the same 16. At the first one that differs, if any, the reference's logits of
    both are as near as errors allow.

    bound: of errors, relative to the row's largest number. options: of the other engine.
    """
    with Artifact(reference) as artifact:
        prompt = random_tokens(artifact.info.vocab_size, 12)
        with Engine(artifact) as engine:
            expected = drive(engine, [(prompt, greedy(16))])[0][0].ids
    with Artifact(other) as artifact, Engine(artifact, **options) as engine:
        found = drive(engine, [(prompt, greedy(16))])[0][0].ids
    assert len(expected) == len(found) == 16
    differ = next((at for at in range(16) if expected[at] != found[at]), None)
    if differ is None:
        return
    with Artifact(reference) as artifact, Replayer(artifact, num_blocks=5) as replayer:
        pages, tokens = Pages(4, artifact.info.block_size), prompt + expected[:differ]
        logits = replay(replayer, 0, pages, [(0, tokens, 0)])[0]
    apart = float(logits[expected[differ]] - logits[found[differ]])
    assert apart <= 2 * bound * float(abs(logits).max())


@needs_opencl
def test_tokens_of_one_family(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, kernel_cache: Path) -> None:
    """Of the artifact that other tests of engines have, too: each driver builds it once a run."""
    setting = opencl_setting(tmp_path_factory, kernel_cache)
    compile_tiny(
        setting.model, tmp_path / "reference", kernel_cache, target="reference", buckets=_BUCKETS, dtype="f32"
    ).close()
    programs = str(program_cache(tmp_path_factory))
    check_same_tokens(tmp_path / "reference", setting.artifact, 1e-4, program_cache=programs)


@pytest.mark.exhaustive
@needs_opencl
@pytest.mark.parametrize("family", _apart(_FIRST))
def test_opencl(family: str, tmp_path: Path, kernel_cache: Path) -> None:
    _, fields = CASES[_FIRST[family]]
    model = make_tiny_model(tmp_path / "model", family, **fields)
    for target in ("reference", "opencl"):
        compile_tiny(model, tmp_path / target, kernel_cache, target=target, buckets=_BUCKETS, dtype="f32").close()
    check_clean(tmp_path / "reference", tmp_path / "opencl", 1e-4)
    check_same_tokens(tmp_path / "reference", tmp_path / "opencl", 1e-4)


@pytest.mark.exhaustive
@pytest.mark.parametrize("quant", [None, "w4a16", "mxfp4"])
def test_latent_attention_and_experts_on_tensor_cores(
    quant: str | None, tmp_path: Path, kernel_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bf16, behind a driver that checks every call, with the kernels on the host."""
    model = make_tiny_model(tmp_path / "model", "deepseek_v2", **_LATENT)
    options: dict[str, Any] = {"buckets": _BUCKETS, "dtype": "bf16"}
    if quant:
        options["quant"] = QuantConfig(quant)
    compile_tiny(model, tmp_path / "reference", kernel_cache, target="reference", **options).close()
    with fake_nvcc(tmp_path):
        compile_tiny(model, tmp_path / "cuda", kernel_cache, target="cuda:sm_80", **options).close()
    code = (tmp_path / "cuda" / "kernels.cuda").read_bytes()
    for op in (b"latent_attention", b"expert_linear", b"linear"):
        assert b"void __launch_bounds__(128, 1) " + op in code, op
    monkeypatch.setenv("STUB_CUDA_KERNELS", str(kernels_on_host(tmp_path / "cuda", tmp_path)))
    stub = Stub(stub_library(tmp_path))
    monkeypatch.setenv("LLMC_CUDA_LIBRARY", str(stub.library))
    check_clean(tmp_path / "reference", tmp_path / "cuda", 3e-2)
    check_same_tokens(tmp_path / "reference", tmp_path / "cuda", 3e-2)
    assert stub.report() == ""
