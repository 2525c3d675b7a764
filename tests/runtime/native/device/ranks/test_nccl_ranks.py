"""Ranks on GPUs that exchange results by NCCL, behind a driver and an NCCL that check every call."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from llmc.compiler.config import CompileConfig
from llmc.compiler.pipeline import compile_model
from llmc.runtime.binding import Artifact, Engine, LlmcError
from llmc.runtime.binding.ranks import LocalRanks
from llmc.runtime.binding.sampling import SamplingParams as EngineParams
from llmc.runtime.llm import LLM

from support.artifacts import made_once
from support.cuda import NcclStub, Stub, fake_nvcc, kernels_on_host, nccl_stub_library, stub_library
from support.processes import until
from support.rank_outputs import await_end, bits, generated
from support.tiny_models import make_tiny_model
from support.word_tokenizer import save_words

PROMPTS = [[5, 6, 7, 8, 9], [3, 4, 5]]
SIZES: dict[str, Any] = {
    "vocab_size": 132, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 4, "head_dim": 8, "attention_bias": True,
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, kernel_cache: Path) -> Path:
    """A folder of an artifact for two ranks, its kernels for the host, and the libraries."""

    def make(folder: Path) -> None:
        make_tiny_model(folder / "model", "llama", **SIZES)
        save_words(folder / "model", SIZES["vocab_size"])
        stub_library(folder)
        nccl_stub_library(folder)
        with fake_nvcc(folder):
            compile_model(
                CompileConfig(
                    folder / "model", folder / "2-1", cache_dir=kernel_cache, dtype="f32", block_size=16, jobs=1,
                    buckets="prefill=1x8,decode=[1,2]x32", target="cuda:sm_80", tensor_parallel=2,
                )
            )  # fmt: skip
        (folder / "kernels").mkdir()
        kernels_on_host(folder / "2-1", folder / "kernels")

    return made_once(tmp_path_factory, "nccl-ranks", make)


@pytest.fixture
def stub(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stub]:
    """At the end of a test there was no mistake of rank 0, and all is given back."""
    monkeypatch.setenv("LLMC_CUDA_LIBRARY", str(folder / "libstub_cuda.so"))
    monkeypatch.setenv("LLMC_NCCL_LIBRARY", str(folder / "libstub_nccl.so"))
    monkeypatch.setenv("STUB_CUDA", "devices=2")
    driver, nccl = Stub(folder / "libstub_cuda.so"), NcclStub(folder / "libstub_nccl.so")
    yield driver
    assert nccl.report() + driver.report() == ""
    nccl.recover()
    driver.recover()


@pytest.fixture
def nccl(folder: Path, stub: Stub) -> NcclStub:
    return NcclStub(folder / "libstub_nccl.so")


@pytest.mark.slow
def test_nccl_gives_the_bits_of_the_host(folder: Path, nccl: NcclStub, monkeypatch: pytest.MonkeyPatch) -> None:
    """In company and alone, with graphs and without."""
    monkeypatch.setenv("STUB_CUDA_KERNELS", str(folder / "kernels" / "kernels.so"))
    with LLM(folder / "2-1", num_blocks=8, device_options={"collective": "host"}) as llm:
        wanted, stats = generated(llm, PROMPTS, 3), llm.engine.device_stats()
    assert stats["all_gathers"] > 0
    assert (stats["nccl_ranks"], stats["nccl_refusal"]) == (0, 1)
    assert nccl.gathered() == 0
    for eager in (False, True):
        options: dict[str, Any] = {"collective": "nccl", "eager": eager}
        with LLM(folder / "2-1", num_blocks=8, prefix_cache=False, device_options=options) as llm:
            found, before = generated(llm, PROMPTS, 3), nccl.gathered()
            alone = [generated(llm, [prompt], 3)[0] for prompt in PROMPTS]
            stats = llm.engine.device_stats()
            pids = llm.engine.ranks.pids
        await_end(pids)
        assert bits(found) == bits(wanted) == bits(alone)
        # By their hosts, ranks have only agreed on NCCL.
        assert (stats["nccl_ranks"], stats["nccl_refusal"], stats["all_gathers"]) == (2, 0, 1)
        assert (stats["replayed_steps"] == 0) == eager
        assert nccl.gathered() > before > 0


def test_a_killed_rank_ends_all(folder: Path, stub: Stub) -> None:
    """Rank 0's GPU waits for a result that does not come."""
    with Artifact(folder / "2-1") as artifact, Engine(artifact, num_blocks=8) as engine:
        assert isinstance(engine.ranks, LocalRanks)
        assert engine.device_stats()["nccl_ranks"] == 2
        engine.submit(PROMPTS[0], EngineParams(max_tokens=20))
        engine.step()
        victim = engine.ranks.pids[0]
        os.kill(victim, signal.SIGKILL)
        with pytest.raises(LlmcError, match=rf"Rank 1 of 2 has failed: its process {victim} .*SIGKILL"):
            until(lambda: not engine.step())


@pytest.mark.parametrize(
    ("said", "sentence"),
    [
        ("CommInitRank=5", r"Joining the ranks by NCCL failed: NCCL refuses the call \(NCCL error 5\)"),
        ("AsyncError@40=6", r"NCCL failed: another rank has failed, or cannot be reached \(NCCL error 6\)"),
        ("AllGather@9=3", r"Exchanging results by NCCL failed: NCCL itself failed \(NCCL error 3\)"),
    ],
)
def test_what_nccl_reports_ends_all(
    folder: Path, stub: Stub, said: str, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STUB_NCCL", said)

    def run() -> None:
        with Artifact(folder / "2-1") as artifact, Engine(artifact, num_blocks=8) as engine:
            engine.submit(PROMPTS[0], EngineParams(max_tokens=20))
            until(lambda: not engine.step())

    with pytest.raises(LlmcError, match=sentence):
        run()


@pytest.mark.parametrize(
    ("environment", "device_number", "refusal", "sentence"),
    [
        ({"LLMC_NCCL_LIBRARY": "no.so"}, "0,1", 2, r"rank 0 of its stage cannot load it; install NCCL 2\.14 or later"),
        ({}, "1,1", 3, "rank 0 of its stage and rank 1 of its stage have the same; name others with --device-number"),
        (
            {"STUB_NCCL": "other_version=21903 leader="},
            "0,1",
            4,
            r"NCCL is 2\.20\.5 on rank 0 .* and 2\.19\.3 on rank 1",
        ),
    ],
)
def test_where_nccl_cannot_be_used_the_host_exchanges_results(
    folder: Path, stub: Stub, environment: dict[str, str], device_number: str, refusal: int, sentence: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    for name, value in environment.items():
        monkeypatch.setenv(name, value + (str(os.getpid()) if value.endswith("=") else ""))
    with Artifact(folder / "2-1") as artifact:
        with Engine(artifact, num_blocks=8, device_number=device_number) as engine:
            stats = engine.device_stats()
        assert (stats["nccl_ranks"], stats["nccl_refusal"]) == (0, refusal)
        with pytest.raises(LlmcError, match=sentence):
            Engine(artifact, num_blocks=8, device_number=device_number, collective="nccl")
