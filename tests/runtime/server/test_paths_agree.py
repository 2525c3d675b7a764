"""Python and HTTP, whole and in pieces: the same request gives the same text, tokens, ends, logprobs and usage."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmc.runtime.async_llm import AsyncLLM
from llmc.runtime.llm import LLM
from llmc.runtime.outputs import CompletionOutput, RequestOutput
from llmc.runtime.params import SamplingParams
from llmc.runtime.server.token_text import TokenTexts

from support.artifacts import TinyArtifact
from support.engine_driver import reference_logits
from support.server_harness import Running, running_server

EOS = 2
FIRST_BYTE = 3


@dataclass
class Paths:
    """The same artifact behind all of them."""

    llm: LLM
    async_llm: AsyncLLM
    running: Running
    texts: TokenTexts
    model: Path


@pytest.fixture(scope="module")
def paths(chat_artifact: Path, tiny_artifact: TinyArtifact) -> Iterator[Paths]:
    async_llm = AsyncLLM(chat_artifact, num_threads=1)
    with LLM(chat_artifact, num_threads=1) as llm, running_server(chat_artifact) as running:
        yield Paths(llm, async_llm, running, TokenTexts(chat_artifact), tiny_artifact.model)
        running.on_loop(async_llm.close)


def token_of(llm: LLM, byte: int) -> int:
    """The token that is one byte."""
    text = TokenTexts(llm.path)
    return next(token for token in range(FIRST_BYTE, 259) if text.bytes_of(token) == bytes([byte]))


@st.composite
def requests(draw: st.DrawFn) -> dict[str, Any]:
    """Sampling as JSON has it, with fields that make every kind of end likely; `bytes` become a logit_bias."""
    # The bytes of é, 世 and a; torn in places, because any may follow any.
    favoured = draw(st.lists(st.sampled_from([0xC3, 0xA9, 0xE4, 0xB8, 0x96, 0x61]), unique=True))
    fields: dict[str, Any] = {
        "max_tokens": draw(st.integers(1, 24)),
        "seed": draw(st.integers(0, 2**32)),
        "temperature": draw(st.sampled_from([0.0, 0.7, 1.0, 2.0])),
        "n": draw(st.integers(1, 3)),
        "favoured": favoured,
        "eos_bias": draw(st.sampled_from([-100, 0, 6, 8, 100])),
        "stop": draw(st.lists(st.text("aé世x", min_size=1, max_size=2), max_size=2)),
        "stop_token_ids": draw(st.lists(st.sampled_from([EOS, 40, 68, 132, 300]), max_size=2, unique=True)),
        "ignore_eos": draw(st.booleans()),
        "include_stop_str_in_output": draw(st.booleans()),
        "skip_special_tokens": draw(st.booleans()),
        "logprobs": draw(st.sampled_from([None, 0, 2])),
    }
    fields["min_tokens"] = draw(st.integers(0, fields["max_tokens"]))
    return fields


def told(output: CompletionOutput) -> dict[str, Any]:
    return {
        "text": output.text,
        "token_ids": list(output.token_ids),
        "finish_reason": output.finish_reason,
        "stop_reason": output.stop_reason,
        "finish_detail": output.finish_detail,
        "logprobs": None if output.logprobs is None else [(p.token_id, p.logprob) for p in output.logprobs],
    }


def streamed(deltas: list[Any], n: int) -> list[dict[str, Any]]:
    """The outputs that deltas of the Python API add up to."""
    outputs = []
    for index in range(n):
        mine = [delta for delta in deltas if delta.output_index == index]
        last = mine[-1]
        assert [delta.finish_reason for delta in mine[:-1]] == [None] * (len(mine) - 1)
        logprobs = [(p.token_id, p.logprob) for delta in mine for p in delta.logprobs or ()]
        outputs.append(
            {
                "text": "".join(delta.text for delta in mine),
                "token_ids": [*chain.from_iterable(delta.token_ids for delta in mine)],
                "finish_reason": last.finish_reason,
                "stop_reason": last.stop_reason,
                "finish_detail": last.finish_detail,
                "logprobs": None if last.logprobs is None else logprobs,
            }
        )
    return outputs


async def on_a_loop(llm: AsyncLLM, prompt: list[int], params: SamplingParams) -> tuple[RequestOutput, list[Any]]:
    whole = asyncio.create_task(llm.generate(prompt, params))
    deltas = [delta async for delta in llm.stream(prompt, params)]
    (output,) = await whole
    return output, deltas


def over_http(paths: Paths, choices: list[dict[str, Any]], n: int, chat: bool) -> list[dict[str, Any]]:
    """The outputs that the choices of answers or chunks add up to."""
    outputs = []
    for index in range(n):
        mine = [choice for choice in choices if choice["index"] == index]
        ends = [choice for choice in mine if choice["finish_reason"] is not None]
        assert ends == mine[-1:]
        ids = [*chain.from_iterable(choice.get("token_ids") or [] for choice in mine)]
        parts = [choice["logprobs"] for choice in mine if choice["logprobs"] is not None]
        if chat:
            text = "".join((c.get("message") or c["delta"]).get("content") or "" for c in mine)
            entries = [entry for part in parts for entry in part["content"]]
            values, labels = [e["logprob"] for e in entries], [e["token"] for e in entries]
        else:
            text = "".join(choice["text"] for choice in mine)
            values = [*chain.from_iterable(part["token_logprobs"] for part in parts)]
            labels = [*chain.from_iterable(part["tokens"] for part in parts)]
        logprobs = None
        if parts:
            assert labels == [paths.texts.label(token) for token in ids]
            logprobs = list(zip(ids, values, strict=True))
        outputs.append(
            {
                "text": text,
                "token_ids": ids,
                "finish_reason": ends[0]["finish_reason"],
                "stop_reason": ends[0]["stop_reason"],
                "finish_detail": ends[0].get("finish_detail"),
                "logprobs": logprobs,
            }
        )
    return outputs


@settings(max_examples=30)
@given(fields=requests(), prompt=st.lists(st.integers(3, 258), min_size=1, max_size=12))
def test_all_paths_agree(paths: Paths, fields: dict[str, Any], prompt: list[int]) -> None:
    llm, running = paths.llm, paths.running
    favoured, eos_bias = fields.pop("favoured"), fields.pop("eos_bias")
    bias = {token_of(llm, byte): 6.0 for byte in favoured} | {EOS: float(eos_bias)}
    params = SamplingParams(**fields, logit_bias=bias)
    n = params.n
    (whole,) = llm.generate(prompt, params)
    expected = [told(output) for output in whole.outputs]
    assert whole.usage.completion_tokens == sum(len(one["token_ids"]) for one in expected)
    assert streamed(list(llm.stream(prompt, params)), n) == expected
    output, deltas = running.on_loop(lambda: on_a_loop(paths.async_llm, prompt, params))
    assert [told(one) for one in output.outputs] == expected
    assert streamed(deltas, n) == expected

    body = {
        **fields,
        "prompt": prompt,
        "logit_bias": {str(token): value for token, value in bias.items()},
        "return_token_ids": True,
    }
    answer = running.post("/v1/completions", **body).json()
    assert over_http(paths, answer["choices"], n, chat=False) == expected
    events = running.events("/v1/completions", **body, stream_options={"include_usage": True})
    assert over_http(paths, [c for event in events for c in event["choices"]], n, chat=False) == expected
    for usage in (answer["usage"], events[-1]["usage"]):
        assert (
            usage["completion_tokens"]
            == whole.usage.completion_tokens
            == sum(map(len, (o["token_ids"] for o in expected)))
        )
        assert usage["prompt_tokens"] == len(prompt)


@settings(max_examples=15)
@given(fields=requests(), question=st.text("aé世 ", max_size=8))
def test_chats_agree(paths: Paths, fields: dict[str, Any], question: str) -> None:
    llm, running = paths.llm, paths.running
    favoured, eos_bias = fields.pop("favoured"), fields.pop("eos_bias")
    bias = {token_of(llm, byte): 6.0 for byte in favoured} | {EOS: float(eos_bias)}
    messages = [{"role": "user", "content": question}]
    params = SamplingParams(**fields, logit_bias=bias)
    (whole,) = llm.chat(messages, params)
    expected = [told(output) for output in whole.outputs]
    assert streamed(list(llm.stream(messages, params)), params.n) == expected
    logprobs = fields.pop("logprobs")
    body = {
        **fields,
        **({} if logprobs is None else {"logprobs": True, "top_logprobs": logprobs}),
        "messages": messages,
        "logit_bias": {str(token): value for token, value in bias.items()},
        "return_token_ids": True,
    }
    answer = running.post("/v1/chat/completions", **body).json()
    assert over_http(paths, answer["choices"], params.n, chat=True) == expected
    events = running.events("/v1/chat/completions", **body, stream_options={"include_usage": True})
    assert over_http(paths, [c for event in events for c in event["choices"]], params.n, chat=True) == expected
    for usage in (answer["usage"], events[-1]["usage"]):
        assert usage["completion_tokens"] == whole.usage.completion_tokens


@pytest.mark.parametrize("bias", [{}, {str(EOS): 100}])
def test_scores_as_lm_eval_reads_them(paths: Paths, bias: dict[str, float]) -> None:
    """The log-likelihood of a continuation, from token_logprobs[ctxlen:-1], whatever the one sampled token is."""
    rng = np.random.default_rng(5)
    for length, start in ((12, 5), (30, 1), (9, 8)):
        tokens = [int(token) for token in rng.integers(3, 258, length)]
        (choice,) = paths.running.complete(
            [tokens], max_tokens=1, echo=True, logprobs=1, temperature=0, logit_bias=bias
        )["choices"]
        told = choice["logprobs"]
        assert len(told["token_logprobs"]) == len(told["tokens"]) == length + 1
        assert (told["tokens"][-1] == "</s>") == bool(bias)
        logits = reference_logits(paths.model, tokens)
        logprobs = logits - np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1, keepdims=True))
        logprobs -= logits.max(-1, keepdims=True)
        expected = sum(float(logprobs[i - 1, tokens[i]]) for i in range(start, length))
        assert sum(told["token_logprobs"][start:-1]) == pytest.approx(expected, abs=1e-3)
        # And the two answers of its rule for greedy: is each token the likeliest one?
        greedy = [max(top, key=top.get) for top in told["top_logprobs"][start:-1]]
        assert greedy == [paths.texts.label(int(best)) for best in logprobs[start - 1 : -1].argmax(-1)]


def test_an_echoed_prompt_alone_has_no_output_token(paths: Paths) -> None:
    body = {"max_tokens": 0, "echo": True, "logprobs": 1, "logit_bias": {str(EOS): 100}, "temperature": 0}
    answer = paths.running.complete([[5, 6, 7]], **body)
    assert len(answer["choices"][0]["logprobs"]["token_logprobs"]) == 3
    assert answer["usage"]["completion_tokens"] == 0


def test_metrics_count_an_eos(paths: Paths) -> None:
    before = paths.running.engine.stats().output_tokens
    answer = paths.running.complete([[5, 6, 7]], max_tokens=5, temperature=0, logit_bias={str(EOS): 100})
    assert answer["usage"]["completion_tokens"] == 1
    assert paths.running.engine.stats().output_tokens == before + 1
