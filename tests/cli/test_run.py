"""Prompts and the generation loop of `llmc run`, with an engine made of Python."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from llmc.cli.run import gather_prompts, parse_logit_bias
from llmc.runtime.offline.prompts import Prompt, PromptError, parse_jsonl, parse_lines, read_file
from llmc.runtime.params import SamplingParams
from llmc.runtime.request_error import RequestError

from support.fake_llm import FakeEngine, FakeLLM


@pytest.fixture
def llm(tmp_path: Path) -> FakeLLM:
    return FakeLLM(FakeEngine(), tmp_path)


def test_generate_keeps_input_order_and_counts(llm: FakeLLM) -> None:
    seen: list[int] = []
    progress: list[tuple[int, int, int]] = []
    params = [SamplingParams(max_tokens=n) for n in (5, 1, 2)]
    outputs = llm.generate(
        ["abc", "de", "fg"], params, on_output=lambda o: seen.append(o.index), progress=lambda *a: progress.append(a)
    )
    assert [o.outputs[0].text for o in outputs] == ["cbacb", "e", "gf"]
    assert [o.outputs[0].finish_reason for o in outputs] == ["length"] * 3
    assert seen == [1, 2, 0]
    assert progress[-1] == (3, 3, 8)
    assert outputs[0].usage.prompt_tokens == 3
    assert outputs[0].timings.ttft_s is not None
    assert outputs[1].timings.tpot_s is None


def test_generate_takes_one_text_and_token_ids(llm: FakeLLM) -> None:
    assert llm.generate("ab", SamplingParams(max_tokens=2))[0].outputs[0].text == "ba"
    (output,) = llm.generate([[97, 98]], SamplingParams(max_tokens=2, logprobs=1))
    assert output.prompt is None
    assert output.outputs[0].token_ids == (98, 97)
    assert output.outputs[0].logprobs is not None
    assert output.outputs[0].logprobs[0].top == {98: -0.5}


def test_stop_string_cancels_the_request(llm: FakeLLM) -> None:
    (output,) = llm.generate("abcd", SamplingParams(max_tokens=12, stop=["ad"]))
    assert output.outputs[0].text == "dcb"
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", "ad")
    assert llm.engine.cancelled == [1]


def test_stop_string_on_the_last_token(llm: FakeLLM) -> None:
    (output,) = llm.generate("abcd", SamplingParams(max_tokens=5, stop=["ad"]))
    assert (output.outputs[0].text, output.outputs[0].finish_reason) == ("dcb", "stop")


@pytest.mark.parametrize("prompt", [[], [-1], [0x110000], [1.5], [True], [1] * 64])
def test_bad_prompts_are_refused_before_anything_runs(llm: FakeLLM, prompt: list[Any]) -> None:
    with pytest.raises(RequestError):
        llm.generate([[1], prompt])
    assert llm.engine.last_id == 0


@pytest.mark.parametrize("prompts", [None, 5, b"ab", {"text": "ab"}, np.int64(3)])
def test_what_is_no_prompt_is_named(llm: FakeLLM, prompts: Any) -> None:
    with pytest.raises(RequestError, match=r"the prompts are .*give a text, token ids or messages"):
        llm.generate(prompts)
    with pytest.raises(RequestError, match="prompt 1 "):
        llm.generate(["a", prompts])
    with pytest.raises(RequestError):
        llm.chat(prompts)


IDS = [98, 97]


@pytest.mark.parametrize("kind", [np.array, torch.tensor, tuple, iter, lambda ids: [np.int32(one) for one in ids]])
def test_token_ids_may_be_of_any_library(llm: FakeLLM, kind: Any) -> None:
    wanted = llm.generate([IDS, IDS], SamplingParams(max_tokens=2))
    outputs = llm.generate([kind(IDS), kind(IDS)], SamplingParams(max_tokens=2))
    assert [one.outputs for one in outputs] == [one.outputs for one in wanted]
    assert all(type(token) is int for one in outputs for token in one.prompt_token_ids)
    (one,) = llm.generate(kind(IDS), SamplingParams(max_tokens=2))
    assert one.outputs == wanted[0].outputs
    if kind in (np.array, torch.tensor):
        assert len(llm.generate(kind([IDS] * 3), SamplingParams(max_tokens=2))) == 3
        with pytest.raises(RequestError, match=r"prompt 0 has token id 1\.5"):
            llm.generate([kind([1.5])])


def test_sampling_params_of_other_types(llm: FakeLLM) -> None:
    numbers = {"max_tokens": np.int64(2), "seed": np.uint8(3), "temperature": np.float32(0.5), "top_k": np.int32(4)}
    lists = {"stop_token_ids": np.array([7]), "logit_bias": {np.int64(5): np.float64(1.5)}, "stop": None}
    given: dict[str, Any] = {**numbers, **lists}
    params = SamplingParams(**given)
    assert params == SamplingParams(
        max_tokens=2, seed=3, temperature=0.5, top_k=4, stop_token_ids=(7,), logit_bias={5: 1.5}
    )
    assert type(params.max_tokens) is type(params.stop_token_ids[0]) is int
    assert type(params.temperature) is float
    assert llm.generate("ab", params)[0].outputs[0].token_ids == (98, 97)
    wrong = {"max_tokens": 4}
    others: list[Any] = [wrong, [wrong], 5]
    for some in others:
        with pytest.raises(RequestError, match="give SamplingParams, for all or for each"):
            llm.generate("ab", some)


@pytest.mark.parametrize(
    "field",
    [
        {"stop": 5},
        {"stop_token_ids": 5},
        {"logit_bias": [1]},
        {"ignore_eos": "no"},
        {"max_tokens": np.float64(3)},
        {"n": 0},
        {"n": 65},
        {"max_tokens": 0},
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"top_k": -2},
        {"logprobs": 21},
        {"seed": -1},
        {"stop": [""]},
        {"stop_token_ids": [-1]},
        {"logit_bias": {1: float("inf")}},
        {"presence_penalty": 3},
    ],
)
def test_sampling_params_out_of_range(field: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=next(iter(field))):
        SamplingParams(**field)


def test_defaults_come_from_the_generation_config() -> None:
    greedy = SamplingParams.from_generation_config({"do_sample": False, "temperature": 0.7})
    assert greedy.temperature == 0
    config = {"do_sample": True, "temperature": 0.7, "top_k": 20}
    sampled = SamplingParams.from_generation_config(config, top_k=None, temperature=0.1)
    assert (sampled.temperature, sampled.top_k) == (0.1, 20)


def test_prompt_files(tmp_path: Path) -> None:
    text, jsonl = tmp_path / "p.txt", tmp_path / "p.jsonl"
    text.write_text("one\n\n two \r\nthree\u2028still three")
    jsonl.write_text(
        '{"prompt": "a"}\n\n{"prompt_token_ids": [1, 2]}\n{"messages": [{"role": "user"}]}\n'
        '{"messages": [{"role": "user"}], "tools": [{"type": "function"}]}\n'
    )
    assert [p.text for p in read_file(text)] == ["one", " two ", "three\u2028still three"]
    assert read_file(jsonl) == [
        Prompt(text="a"),
        Prompt(token_ids=(1, 2)),
        Prompt(messages=({"role": "user"},)),
        Prompt(messages=({"role": "user"},), tools=({"type": "function"},)),
    ]
    assert parse_lines(["a\n", "\n"]) == [Prompt(text="a")]


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[]",
        "{}",
        '{"text": "a"}',
        '{"prompt": "a", "prompt_token_ids": [1]}',
        '{"prompt": ""}',
        '{"prompt": 3}',
        '{"prompt_token_ids": []}',
        '{"prompt_token_ids": [-1]}',
        '{"prompt_token_ids": [true]}',
        '{"messages": ["x"]}',
        '{"messages": [{"role": "user"}], "tools": ["x"]}',
        '{"prompt": "a", "tools": []}',
        '{"tools": []}',
    ],
)
def test_bad_prompt_lines_name_the_line(line: str) -> None:
    with pytest.raises(PromptError, match="f line 2"):
        parse_jsonl(['{"prompt": "a"}', line], "f")


@pytest.mark.parametrize(
    ("name", "content"), [("p.csv", b"a"), ("p.txt", b""), ("p.txt", b"\xff\xfe"), ("none.txt", None)]
)
def test_bad_prompt_files(tmp_path: Path, name: str, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(PromptError, match=name):
        read_file(tmp_path / name)


def test_prompts_from_stdin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("a\nb\n"))
    assert gather_prompts([], None, chat=False) == [Prompt(text="a"), Prompt(text="b")]
    assert gather_prompts(["x"], None, chat=True) == [Prompt(text="x")]


def test_logit_bias_flag() -> None:
    assert parse_logit_bias(["15=-2.5", "3=1"]) == {15: -2.5, 3: 1.0}
