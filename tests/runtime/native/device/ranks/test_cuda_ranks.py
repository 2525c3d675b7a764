"""Ranks and stages on GPUs, behind a driver that checks every call and runs kernels on the host."""

from __future__ import annotations

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
from support.cuda import Stub, fake_nvcc, kernels_on_host, stub_library
from support.processes import until
from support.rank_outputs import await_end, bits, check_close, generated
from support.tiny_models import make_tiny_model
from support.word_tokenizer import save_words

PROMPTS = [[5, 6, 7, 8, 9], [3, 4, 5]]
SIZES: dict[str, Any] = {
    "vocab_size": 132, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "head_dim": 8, "attention_bias": True,
}  # fmt: skip
PARTS = ((1, 1), (2, 1), (1, 2))


@pytest.fixture(scope="module")
def parted(tmp_path_factory: pytest.TempPathFactory, kernel_cache: Path) -> Path:
    """A folder of artifacts by number of ranks of a stage, and of stages, and of their kernels for the host."""

    def make(folder: Path) -> None:
        make_tiny_model(folder / "model", "llama", **SIZES)
        save_words(folder / "model", SIZES["vocab_size"])
        stub_library(folder)
        with fake_nvcc(folder):
            for ranks, stages in PARTS:
                path = folder / f"{ranks}-{stages}"
                compile_model(
                    CompileConfig(
                        folder / "model", path, cache_dir=kernel_cache, dtype="f32", block_size=16, jobs=1,
                        buckets="prefill=1x8,decode=2x32", target="cuda:sm_80", tensor_parallel=ranks,
                        pipeline_parallel=stages,
                    )
                )  # fmt: skip
                if stages == 1:  # those of stages are the same
                    (folder / f"kernels-{ranks}").mkdir()
                    kernels_on_host(path, folder / f"kernels-{ranks}")

    return made_once(tmp_path_factory, "cuda-ranks", make)


@pytest.fixture
def stub(parted: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stub]:
    """At the end of a test there was no mistake of rank 0, and all is given back."""
    monkeypatch.setenv("LLMC_CUDA_LIBRARY", str(parted / "libstub_cuda.so"))
    monkeypatch.setenv("LLMC_NCCL_LIBRARY", str(parted / "no_nccl.so"))
    monkeypatch.setenv("STUB_CUDA", "devices=2")
    stub = Stub(parted / "libstub_cuda.so")
    yield stub
    assert stub.report() == ""
    stub.recover()


@pytest.mark.slow
def test_ranks_and_stages_generate_what_one_gpu_does(parted: Path, stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    found = {}
    for ranks, stages in PARTS:
        monkeypatch.setenv("STUB_CUDA_KERNELS", str(parted / f"kernels-{ranks}" / "kernels.so"))
        with LLM(parted / f"{ranks}-{stages}", num_blocks=8) as llm:
            found[ranks, stages] = generated(llm, PROMPTS, 3)
            stats = llm.engine.device_stats()
            if ranks * stages == 1:
                continue
            pids = llm.engine.ranks.pids
            assert stats["working_ranks"] == 2
            assert stats["replayed_steps"] > 0
            assert stats["launched_steps"] == 0
        await_end(pids)
    one = found[1, 1]
    assert bits(found[1, 2]) == bits(one)
    check_close(found[2, 1], one)
    # Alone, on one GPU of both ranks, launched one by one, with weights on the host.
    monkeypatch.setenv("STUB_CUDA_KERNELS", str(parted / "kernels-2" / "kernels.so"))
    options: dict[str, Any] = {"eager": True, "device_number": "1", "offload_mib": 1}
    with LLM(parted / "2-1", num_blocks=8, prefix_cache=False, device_options=options) as llm:
        alone = [generated(llm, [prompt], 3)[0] for prompt in PROMPTS]
        stats = llm.engine.device_stats()
        assert stats["replayed_steps"] == 0
        assert 0 < stats["offloaded_weight_bytes"] <= stats["weight_bytes"]
    assert bits(alone) == bits(found[2, 1])


def test_a_rank_whose_gpu_fails_ends_all(parted: Path, stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels compute nothing here. The stub of rank 0 fails in a step, while rank 1 waits for its result."""
    with Artifact(parted / "2-1") as artifact, Engine(artifact, num_blocks=8) as engine:
        assert isinstance(engine.ranks, LocalRanks)
        pids = engine.ranks.pids
        engine.submit(PROMPTS[0], EngineParams(max_tokens=4))
        monkeypatch.setenv("STUB_CUDA", "devices=2 GraphLaunch=719")
        with pytest.raises(LlmcError, match=r"Replaying a graph failed: a kernel failed \(CUDA error 719\)"):
            until(lambda: not engine.step())
        await_end(pids)
    monkeypatch.setenv("STUB_CUDA", "devices=2")
    stub.recover()


def test_each_rank_has_a_gpu(parted: Path, stub: Stub) -> None:
    with Artifact(parted / "2-1") as artifact:
        with pytest.raises(LlmcError, match=r"(?s)There is no GPU number 2; this process may use numbers 0 … 1"):
            Engine(artifact, num_blocks=8, device_number="2,1")
        with pytest.raises(LlmcError, match=r"Rank 1 of 2 has failed"):
            Engine(artifact, num_blocks=8, device_number="1,2")
