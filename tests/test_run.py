"""Prompts, results, resume and the generation loop of `llmc run`, with an engine made of Python."""

from __future__ import annotations

import io
import json
import time
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llmc.cli.prompts import Prompt, PromptError, parse_jsonl, parse_lines, read_file
from llmc.cli.results import ResultsError, ResultsFile
from llmc.cli.run import gather_prompts, parse_logit_bias, run_prompts
from llmc.runtime.binding import LlmcError
from llmc.runtime.llm import LLM
from llmc.runtime.params import RequestError, SamplingParams


class FakeTokenizer:
    """A token is a character."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [ord(char) for char in text]

    def decode(self, token_ids: Any) -> str:
        return "".join(map(chr, token_ids))


class FakeEngine:
    """Answers each prompt with its tokens reversed and repeated, one token a step, at most `slots` at a time."""

    def __init__(self, slots: int = 2, interrupt_after: int | None = None) -> None:
        self.slots = slots
        self.interrupt_after = interrupt_after
        self.queue: deque[dict[str, Any]] = deque()
        self.events: list[SimpleNamespace] = []
        self.num_steps = 0
        self.last_id = 0
        self.cancelled: list[int] = []

    def submit(self, token_ids: list[int], params: SamplingParams) -> int:
        self.last_id += 1
        answer = (token_ids[::-1] * params.max_tokens)[: params.max_tokens]
        self.queue.append({"id": self.last_id, "answer": answer, "done": 0, "prompt": len(token_ids)})
        return self.last_id

    def cancel(self, request_id: int) -> None:
        self.cancelled.append(request_id)
        if all(request["id"] != request_id for request in self.queue):
            raise LlmcError(2, "Request is unknown or has finished; nothing to cancel.")
        self.queue = deque(request for request in self.queue if request["id"] != request_id)

    def step(self) -> bool:
        self.num_steps += 1
        if self.num_steps == self.interrupt_after:
            raise KeyboardInterrupt
        for request in list(self.queue)[: self.slots]:
            self._emit(request, kind="token", token_id=request["answer"][request["done"]])
            request["done"] += 1
            if request["done"] == len(request["answer"]):
                self.queue.remove(request)
                self._emit(request, kind="finished", token_id=-1, finish_reason="length")
        return bool(self.queue)

    def _emit(self, request: dict[str, Any], kind: str, token_id: int, finish_reason: str | None = None) -> None:
        self.events.append(
            SimpleNamespace(
                kind=kind,
                request_id=request["id"],
                output_index=0,
                token_id=token_id,
                finish_reason=finish_reason,
                num_prompt_tokens=request["prompt"],
                num_cached_tokens=0,
                num_output_tokens=request["done"],
                error_code=0,
                logprob=-0.5,
                top_logprobs=((token_id, -0.5),),
                time_ns=time.monotonic_ns(),
            )
        )

    def poll(self) -> list[SimpleNamespace]:
        events, self.events = self.events, []
        return events

    @property
    def stats(self) -> SimpleNamespace:
        return SimpleNamespace(scheduled_tokens=6, padded_tokens=2, num_bucket_misses=0, num_preemptions=0)

    def graph_use(self) -> list[tuple[int, int]]:
        return [(0, 0), (3, 6)]

    def close(self) -> None:
        pass


class FakeLLM(LLM):
    def __init__(self, engine: FakeEngine, path: Path) -> None:
        self.path = path
        self.engine = engine
        graphs = [SimpleNamespace(phase=phase, batch=1, seq=64) for phase in ("prefill", "decode")]
        self.artifact = SimpleNamespace(graphs=lambda: graphs, close=lambda: None)
        self._setup(SimpleNamespace(max_model_len=64, vocab_size=0x110000, max_num_seqs=4))
        self._tokenizer = FakeTokenizer()  # type: ignore[assignment]


@pytest.fixture
def llm(tmp_path: Path) -> FakeLLM:
    return FakeLLM(FakeEngine(), tmp_path)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


PROMPTS = [Prompt(text=text) for text in ("abc", "de", "fghi", "j")]


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


@pytest.mark.parametrize(
    "field",
    [
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


def test_results_are_written_in_input_order(llm: FakeLLM, tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    results = ResultsFile(path, PROMPTS)
    records, summary = run_prompts(llm, PROMPTS, SamplingParams(max_tokens=3), results)
    results.close()
    assert lines(path) == records
    assert [r["index"] for r in records] == [0, 1, 2, 3]
    assert set(records[0]) == {"index", "prompt", "text", "token_ids", "finish_reason", "usage"}
    assert records[0]["usage"] == {"prompt_tokens": 3, "completion_tokens": 3, "cached_tokens": 0}
    assert summary["padding_waste"] == 0.25
    assert summary["graph_use"] == [{"graph": "decode:1x64", "replays": 3, "tokens": 6}]
    assert not results.partial_path.exists()


def test_interrupt_keeps_what_finished_and_resume_continues(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    params = SamplingParams(max_tokens=2)
    results = ResultsFile(path, PROMPTS)
    engine = FakeEngine(slots=1, interrupt_after=6)
    with pytest.raises(KeyboardInterrupt):
        run_prompts(FakeLLM(engine, tmp_path), PROMPTS, params, results)
    results.close()
    assert [r["index"] for r in lines(path)] == [0, 1]
    assert engine.cancelled == [3, 4]
    with path.open("a") as file:
        file.write('{"index": 2, "pro')  # a line torn by a crash

    results = ResultsFile(path, PROMPTS, resume=True)
    assert results.finished == {0, 1}
    engine = FakeEngine()
    run_prompts(FakeLLM(engine, tmp_path), PROMPTS, params, results)
    results.close()
    assert engine.last_id == 2
    assert [r["text"] for r in lines(path)] == ["cb", "ed", "ih", "jj"]


def record(index: int) -> dict[str, Any]:
    return {"index": index, **PROMPTS[index].as_record(), "text": "t"}


def test_out_of_order_results_survive_in_the_side_file(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    results = ResultsFile(path, PROMPTS)
    results.add(record(2))
    results.add(record(1))
    assert lines(path) == []
    results.close()
    assert results.partial_path.exists()

    results = ResultsFile(path, PROMPTS, resume=True)
    assert results.finished == {1, 2}
    results.add(record(0))
    assert [r["index"] for r in lines(path)] == [0, 1, 2]
    results.add(record(3))
    results.close()
    assert [r["index"] for r in lines(path)] == [0, 1, 2, 3]
    assert not results.partial_path.exists()


def test_existing_output_is_not_overwritten_by_accident(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    path.write_text("mine\n")
    with pytest.raises(ResultsError, match="--resume"):
        ResultsFile(path, PROMPTS)
    assert path.read_text() == "mine\n"
    results = ResultsFile(path, PROMPTS, overwrite=True)
    results.close()
    assert path.read_text() == ""


@pytest.mark.parametrize(
    "content",
    [
        json.dumps({"index": 0, "prompt": "other"}),
        json.dumps({"index": 4, "prompt": "abc"}),
        json.dumps({"index": 1, "prompt": "de"}),
        json.dumps({"index": True, "prompt": "de"}),
        "[1]",
        "broken\n" + json.dumps({"index": 0, "prompt": "abc"}),
    ],
)
def test_resume_refuses_a_file_of_other_prompts(tmp_path: Path, content: str) -> None:
    path = tmp_path / "out.jsonl"
    path.write_text(content + "\n")
    with pytest.raises(ResultsError):
        ResultsFile(path, PROMPTS, resume=True)
    assert path.read_text() == content + "\n"


def test_unwritable_output_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ResultsError, match="cannot write"):
        ResultsFile(tmp_path / "none" / "out.jsonl", PROMPTS)


def test_prompt_files(tmp_path: Path) -> None:
    text, jsonl = tmp_path / "p.txt", tmp_path / "p.jsonl"
    text.write_text("one\n\n two \r\nthree\u2028still three")
    jsonl.write_text('{"prompt": "a"}\n\n{"prompt_token_ids": [1, 2]}\n{"messages": [{"role": "user"}]}\n')
    assert [p.text for p in read_file(text)] == ["one", " two ", "three\u2028still three"]
    assert read_file(jsonl) == [
        Prompt(text="a"),
        Prompt(token_ids=(1, 2)),
        Prompt(messages=({"role": "user"},)),
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
