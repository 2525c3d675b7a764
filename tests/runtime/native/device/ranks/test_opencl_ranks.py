"""Ranks and stages on OpenCL devices: what an undivided model generates, and equal bits in any company."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from llmc.compiler.config import CompileConfig
from llmc.compiler.pipeline import compile_model
from llmc.runtime.binding import Artifact, Engine, LlmcError
from llmc.runtime.binding.ranks import LocalRanks, RanksError
from llmc.runtime.binding.sampling import SamplingParams as EngineParams
from llmc.runtime.llm import LLM

from support.artifacts import made_once
from support.opencl import needs_opencl, program_cache
from support.processes import until
from support.rank_outputs import await_end, bits, check_close, generated
from support.tiny_models import make_tiny_model
from support.word_tokenizer import save_words

pytestmark = needs_opencl
PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [3, 4, 5], [100, 200, 230, 50] * 5]
SIZES: dict[str, Any] = {
    "vocab_size": 260, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "attention_bias": True,
}  # fmt: skip
PARTS = ((1, 1), (2, 1), (1, 2))


@pytest.fixture(scope="module")
def parted(tmp_path_factory: pytest.TempPathFactory, kernel_cache: Path) -> dict[tuple[int, int], Path]:
    """By number of ranks of a stage, and of stages."""

    def make(folder: Path) -> None:
        make_tiny_model(folder / "model", "llama", **SIZES)
        save_words(folder / "model", SIZES["vocab_size"])
        for ranks, stages in PARTS:
            compile_model(
                CompileConfig(
                    folder / "model", folder / f"{ranks}-{stages}", cache_dir=kernel_cache, dtype="f32", block_size=16,
                    buckets="prefill=[1,2]x16,decode=2x64", jobs=1, target="opencl", tensor_parallel=ranks,
                    pipeline_parallel=stages,
                )
            )  # fmt: skip

    folder = made_once(tmp_path_factory, "opencl-ranks", make)
    return {(ranks, stages): folder / f"{ranks}-{stages}" for ranks, stages in PARTS}


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return {"device_options": {"program_cache": str(program_cache(tmp_path_factory))}}


@pytest.mark.slow
def test_ranks_and_stages_generate_what_one_device_does(
    parted: dict[tuple[int, int], Path], options: dict[str, Any]
) -> None:
    with LLM(parted[1, 1], **options) as llm:
        one = generated(llm, PROMPTS, 6)
    found = {}
    for part in PARTS[1:]:
        with LLM(parted[part], **options) as llm:
            found[part] = generated(llm, PROMPTS, 6)
            alone = [generated(llm, [prompt], 6)[0] for prompt in PROMPTS]  # the prefix cache has some of them by now
            pids, stats = llm.engine.ranks.pids, llm.engine.device_stats()
        await_end(pids)
        assert bits(alone) == bits(found[part])
        assert stats["working_ranks"] == 2
        assert stats["drawn_on_device"] == 0
        # Of five sums a step, and of its logits, only the parts travel.
        assert stats["all_reduces"] == 0
        assert stats["all_gathers"] % 6 == 0
        assert (stats["all_gathers"] > 0) == (part == (2, 1))
        assert (stats["pass_ons"] > 0) == (part == (1, 2))
    assert bits(found[1, 2]) == bits(one)
    check_close(found[2, 1], one)
    # A pool in which sequences make way for one another, chunks of prompts, and kernels that are launched one by one.
    eager: dict[str, Any] = {"device_options": {**options["device_options"], "eager": True, "device_number": "0,0"}}
    with LLM(parted[2, 1], num_blocks=5, prefix_cache=False, max_tokens_per_step=4, **eager) as llm:
        assert bits(generated(llm, PROMPTS, 6)) == bits(found[2, 1])


def test_a_rank_that_is_killed_ends_running_requests(
    parted: dict[tuple[int, int], Path], options: dict[str, Any]
) -> None:
    with Artifact(parted[2, 1]) as artifact, Engine(artifact, **options["device_options"]) as engine:
        assert isinstance(engine.ranks, LocalRanks)
        engine.submit(PROMPTS[0], EngineParams(max_tokens=40))
        engine.step()
        victim = engine.ranks.pids[0]
        os.kill(victim, signal.SIGKILL)
        with pytest.raises(LlmcError, match=rf"Rank 1 of 2 has failed: its process {victim} .*SIGKILL"):
            until(lambda: not engine.step())


def test_what_ranks_of_gpus_refuse(parted: dict[tuple[int, int], Path], options: dict[str, Any]) -> None:
    given = options["device_options"]
    with Artifact(parted[2, 1]) as artifact:
        with pytest.raises(RanksError, match=r"'0,1,2' lists 3 GPUs and this host has 2 ranks: name one for each"):
            Engine(artifact, device_number="0,1,2", **given)
        with pytest.raises(LlmcError, match="A device of several ranks has no swap space; leave it out"):
            Engine(artifact, swap_bytes=1 << 20, **given)
