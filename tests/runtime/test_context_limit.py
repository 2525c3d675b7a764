"""A KV pool that holds less than the model's context: told at the start, everywhere, and where it ends a request."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import pytest

from llmc.runtime.context_limit import ContextLimit
from llmc.runtime.llm import LLM
from llmc.runtime.params import SamplingParams
from llmc.runtime.request_error import RequestError

from support.compiled import random_tokens
from support.server_harness import error_of, running_server
from support.state_artifact import state_artifact

GREEDY = SamplingParams(max_tokens=50, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def block_size(chat_artifact: Path) -> int:
    with LLM(chat_artifact, num_threads=1) as llm:
        assert not llm.limit.by_pool
        assert llm.limit.warning is None
        return int(llm.artifact.info.block_size)


def test_python_tells_the_limit(chat_artifact: Path, block_size: int, caplog: pytest.LogCaptureFixture) -> None:
    with LLM(chat_artifact, num_threads=1, num_blocks=1) as llm:
        (warning,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
        assert f"a request may have {block_size} tokens, not the model's 64, because the KV pool" in warning
        assert llm.max_model_len == llm.stats().max_request_tokens == block_size
        (output,) = llm.generate([[5, 6, 7]], GREEDY)
        (end,) = output.outputs
        assert (end.finish_reason, len(end.token_ids)) == ("length", block_size - 3)
        assert end.finish_detail is not None
        assert f"fill the {block_size} tokens that the KV pool holds" in end.finish_detail
        # What max_tokens ends is not told so.
        assert llm.generate([[5, 6, 7]], SamplingParams(max_tokens=2))[0].outputs[0].finish_detail is None
        refusal = f"prompt 1 has {block_size} tokens and the KV pool holds {block_size}: shorten it to at most"
        with pytest.raises(RequestError, match=refusal):
            llm.generate([[5], [5] * block_size], GREEDY)


def test_the_pool_that_the_warning_asks_for_is_enough(
    chat_artifact: Path, block_size: int, caplog: pytest.LogCaptureFixture
) -> None:
    with LLM(chat_artifact, num_threads=1, num_blocks=1) as llm:
        enough, blocks = llm.limit.kv_bytes, 64 // block_size
        assert (llm.limit.warning or "").endswith(f"raise num_blocks to {blocks}")
        smallest = 2 * llm.artifact.info.kv_block_bytes
    with LLM(chat_artifact, num_threads=1, num_blocks=blocks) as llm:
        assert llm.max_model_len == 64
    with LLM(chat_artifact, num_threads=1, kv_bytes=smallest) as llm:
        warned = re.search(r"raise kv_bytes \(--kv-bytes\) to (\d+)", llm.limit.warning or "")
        assert warned is not None
        assert int(warned[1]) == enough
    caplog.clear()
    with LLM(chat_artifact, num_threads=1, kv_bytes=enough) as llm:
        assert llm.max_model_len == 64
    with LLM(chat_artifact, num_threads=1, kv_bytes=enough - 1) as llm:
        assert llm.max_model_len < 64
    assert len(caplog.records) == 1


@pytest.mark.parametrize("options", [{}, {"max_num_seqs": 1}, {"num_states": 2}, {"num_states": 7, "max_num_seqs": 2}])
def test_the_pool_also_has_the_states_of_this_engine(
    options: dict[str, Any], tmp_path_factory: pytest.TempPathFactory, kernel_cache: Path
) -> None:
    artifact = state_artifact(tmp_path_factory, kernel_cache)
    with LLM(artifact, num_threads=1, **options) as llm:
        info, enough, states = llm.artifact.info, llm.limit.kv_bytes, llm.engine.stats.num_states
    assert states == options.get("num_states", 3 * options.get("max_num_seqs", 3))
    assert enough == 5 * info.kv_block_bytes + (states + 1) * info.state_bytes
    for kv_bytes, whole in ((enough, True), (enough - 1, False), (enough + info.state_bytes, True)):
        with LLM(artifact, num_threads=1, kv_bytes=kv_bytes, **options) as llm:
            assert (llm.max_model_len == 64) is whole
            assert llm.limit.kv_bytes == enough


def test_the_models_own_limit_is_named() -> None:
    limit = ContextLimit(tokens=64, model_tokens=64)
    assert limit.refusal(63) is None
    assert limit.refusal(64) == (
        "64 tokens and max-model-len is 64: shorten it to at most 63, or compile with a larger --max-model-len"
    )


def test_a_server_tells_the_limit(chat_artifact: Path, block_size: int, caplog: pytest.LogCaptureFixture) -> None:
    with LLM(chat_artifact, num_threads=1) as llm:
        kv_bytes = 2 * llm.artifact.info.kv_block_bytes
    with running_server(chat_artifact, kv_bytes=kv_bytes) as running:
        assert [r for r in caplog.records if "the KV pool holds no more" in r.getMessage()]
        assert running.client.get("/v1/models").json()["data"][0]["max_model_len"] == block_size
        assert f"llmc_max_request_tokens {float(block_size)}" in running.client.get("/metrics").text
        prompt = random_tokens(250, block_size)
        error = error_of(running.post("/v1/completions", prompt=prompt), 400)
        assert error["code"] == "context_length_exceeded"
        assert f"is {block_size} tokens here, where the KV pool holds fewer than its 64," in error["message"]
        assert error_of(running.post("/v1/completions", prompt=prompt[:5], max_tokens=50), 400)["param"] == "max_tokens"
        # What nobody asked for in tokens is as long as the pool allows, and says so.
        short = prompt[: block_size - 4]
        (choice,) = running.complete(short, ignore_eos=True)["choices"]
        assert choice["finish_reason"] == "length"
        assert f"fill the {block_size} tokens that the KV pool holds" in choice["finish_detail"]
        events = running.events("/v1/completions", prompt=short, ignore_eos=True)
        assert [c["finish_detail"] for e in events for c in e["choices"] if c["finish_reason"]] == [
            choice["finish_detail"]
        ]
        (choice,) = running.complete(short, max_tokens=2, ignore_eos=True)["choices"]
        assert "finish_detail" not in choice
        (choice,) = running.chat("", ignore_eos=True)["choices"]
        assert "the KV pool holds" in choice["finish_detail"]
