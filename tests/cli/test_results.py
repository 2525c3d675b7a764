"""The output file of `llmc run`: order, durability, resuming, and what a resume refuses."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from llmc.cli.run import run_prompts
from llmc.runtime.offline.identity import difference, run_identity
from llmc.runtime.offline.prompts import Prompt
from llmc.runtime.offline.results import ResultsError, ResultsFile
from llmc.runtime.params import SamplingParams

from support.fake_llm import FakeEngine, FakeLLM

IDENTITY: dict[str, Any] = {
    "artifact": "0123456789abcdef",
    "chat": False,
    "sampling": {"seed": 1},
    "prompts": {"count": 4},
}


@pytest.fixture
def llm(tmp_path: Path) -> FakeLLM:
    return FakeLLM(FakeEngine(), tmp_path)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


PROMPTS = [Prompt(text=text) for text in ("abc", "de", "fghi", "j")]


def test_results_are_written_in_input_order(llm: FakeLLM, tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    results = ResultsFile(path, PROMPTS, IDENTITY)
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
    results = ResultsFile(path, PROMPTS, IDENTITY)
    engine = FakeEngine(slots=1, interrupt_after=6)
    with pytest.raises(KeyboardInterrupt):
        run_prompts(FakeLLM(engine, tmp_path), PROMPTS, params, results)
    results.close()
    assert [r["index"] for r in lines(path)] == [0, 1]
    assert engine.cancelled == [3, 4]
    with path.open("a") as file:
        file.write('{"index": 2, "pro')  # a line torn by a crash

    results = ResultsFile(path, PROMPTS, IDENTITY, resume=True)
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
    results = ResultsFile(path, PROMPTS, IDENTITY)
    results.add(record(2))
    results.add(record(1))
    assert lines(path) == []
    results.close()
    assert results.partial_path.exists()

    results = ResultsFile(path, PROMPTS, IDENTITY, resume=True)
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
        ResultsFile(path, PROMPTS, IDENTITY)
    assert path.read_text() == "mine\n"
    results = ResultsFile(path, PROMPTS, IDENTITY, overwrite=True)
    assert path.read_text() == "mine\n", "nothing is lost before there is something new"
    results.add(record(0))
    results.close()
    assert [r["index"] for r in lines(path)] == [0]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (json.dumps({"index": 0, "prompt": "other"}), "belongs to other prompts, number 0 differs"),
        (json.dumps({"index": 4, "prompt": "abc"}), "index 4 and there are 4 prompts"),
        (json.dumps({"index": 1, "prompt": "de"}), "index 1 where 0 belongs"),
        (json.dumps({"index": True, "prompt": "de"}), "index True"),
        ("[1]", "line 1 is not a result"),
        ("broken\n" + json.dumps({"index": 0, "prompt": "abc"}), "line 1 is not valid JSON"),
    ],
)
def test_resume_refuses_a_file_of_other_prompts(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "out.jsonl"
    path.write_text(content + "\n")
    path.with_name("out.jsonl.run").write_text(json.dumps(IDENTITY))
    with pytest.raises(ResultsError, match=message):
        ResultsFile(path, PROMPTS, IDENTITY, resume=True)
    assert path.read_text() == content + "\n"


def test_resume_needs_to_know_how_the_results_were_made(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    results = ResultsFile(path, PROMPTS, IDENTITY)
    results.add(record(0))
    results.close()
    before = path.read_bytes()
    changed = {**IDENTITY, "sampling": {"seed": 2}}
    with pytest.raises(ResultsError, match=r"out\.jsonl was made with seed 1 and this run has 2: resume with the same"):
        ResultsFile(path, PROMPTS, changed, resume=True)
    results.run_path.write_text("{")
    with pytest.raises(ResultsError, match=r"cannot read .*out\.jsonl\.run"):
        ResultsFile(path, PROMPTS, IDENTITY, resume=True)
    results.run_path.unlink()
    with pytest.raises(ResultsError, match=r"no out\.jsonl\.run beside it"):
        ResultsFile(path, PROMPTS, IDENTITY, resume=True)
    assert path.read_bytes() == before


def test_two_runs_do_not_write_one_file(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    first, second = (ResultsFile(path, PROMPTS, IDENTITY) for _ in range(2))
    first.add(record(0))
    with pytest.raises(ResultsError, match="another llmc run writes"):
        second.add(record(0))
    first.close()
    assert [r["index"] for r in lines(path)] == [0]


@pytest.mark.parametrize("cut", range(1, 40, 3))
def test_a_result_torn_at_any_byte_is_made_again(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "out.jsonl"
    results = ResultsFile(path, PROMPTS, IDENTITY)
    for index in (0, 1, 3):
        results.add({**record(index), "text": "é" * 9})
    results.close()
    whole = [path.read_bytes(), results.partial_path.read_bytes()]
    path.write_bytes(whole[0][:-cut])
    results.partial_path.write_bytes(whole[1][:-cut])
    results = ResultsFile(path, PROMPTS, IDENTITY, resume=True)
    assert results.finished == {0}
    for index in (3, 2, 1):
        results.add({**record(index), "text": "é" * 9})
    results.close()
    assert [r["index"] for r in lines(path)] == [0, 1, 2, 3]
    assert path.read_bytes().startswith(whole[0])


def test_failed_requests_say_why_and_the_others_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    engine = FakeEngine(failing={ord("d"): 10, ord("f"): 11}, refused=ord("j"))
    results = ResultsFile(path, PROMPTS, IDENTITY)
    records, summary = run_prompts(FakeLLM(engine, tmp_path), PROMPTS, SamplingParams(max_tokens=3), results)
    results.close()
    assert lines(path) == records
    assert [r["finish_reason"] for r in records] == ["length", "error", "error", "error"]
    assert [r["text"] for r in records] == ["cba", "ed", "ih", ""]
    assert [r.get("error", {}).get("code") for r in records] == [None, "bucket_miss", "internal", "invalid_argument"]
    failed = "the request failed after {} prompt and 2 output tokens: Made to fail with status {}."
    assert [r["error"]["message"] for r in records[1:3]] == [failed.format(2, 10), failed.format(4, 11)]
    assert "fit the KV pool" in records[3]["error"]["message"]
    assert (summary["requests"], summary["failed"]) == (4, 3)

    # Once the cause is gone a resume makes the failed ones again, and only those.
    results = ResultsFile(path, PROMPTS, IDENTITY, resume=True)
    assert results.finished == {0}
    engine = FakeEngine(failing={ord("f"): 11})
    run_prompts(FakeLLM(engine, tmp_path), PROMPTS, SamplingParams(max_tokens=3), results)
    results.close()
    assert engine.last_id == 3
    assert [r["text"] for r in lines(path)] == ["cba", "ede", "ih", "jjj"]
    results = ResultsFile(path, PROMPTS, IDENTITY, resume=True)
    assert results.finished == {0, 1, 3}
    results.add({**record(2), "text": "ihg"})
    results.close()
    assert [r["text"] for r in lines(path)] == ["cba", "ede", "ihg", "jjj"]


# ---- what makes two runs the same --------------------------------------------------------------------------------


@pytest.fixture
def artifact(tmp_path: Path) -> Path:
    path = tmp_path / "artifact"
    path.mkdir()
    (path / "manifest.json").write_text("{}")
    (path / "tokenizer.json").write_text("{}")
    (path / "weights.safetensors").write_bytes(bytes(1 << 20))
    return path


def test_equal_runs_have_no_difference(artifact: Path) -> None:
    params = SamplingParams(stop=["a"], logit_bias={3: 1.5}, seed=1)
    identities = [run_identity(artifact, PROMPTS, params, chat=False) for _ in range(2)]
    assert difference(json.loads(json.dumps(identities[0])), identities[1]) is None


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(b"\1")


def test_every_difference_is_named(artifact: Path, tmp_path: Path) -> None:
    before = run_identity(artifact, PROMPTS, SamplingParams(temperature=0.7), chat=True)

    def now(prompts: list[Prompt] = PROMPTS, chat: bool = True, **params: Any) -> str | None:
        sampling = SamplingParams(**{"temperature": 0.7, **params})
        return difference(before, run_identity(artifact, prompts, sampling, chat=chat))

    assert now(temperature=0.2) == "temperature 0.7 and this run has 0.2"
    assert now(stop=["x"]) == 'stop [] and this run has ["x"]'
    assert now(logit_bias={3: 1.0}) == 'logit_bias {} and this run has {"3": 1.0}'
    assert now(chat=False) == "--chat and this run has none"
    assert now(PROMPTS[:3]) == "4 prompts and this run has 3"
    assert now([*PROMPTS[:3], Prompt(text="k")]) == "other prompts"
    assert difference([], before) == "settings that cannot be read"
    for offset in (0, 1 << 19, (1 << 20) - 1):
        copy = tmp_path / f"copy{offset}"
        shutil.copytree(artifact, copy)
        assert difference(before, run_identity(copy, PROMPTS, SamplingParams(temperature=0.7), chat=True)) is None
        # A fine-tune changes every weight: each of the pages that are looked at.
        for start in range(0, 1 << 20, 4096):
            flip(copy / "weights.safetensors", start + offset % 4096)
        found = difference(before, run_identity(copy, PROMPTS, SamplingParams(temperature=0.7), chat=True))
        assert found is not None
        assert found.startswith(f"artifact {before['artifact'][:12]} and this run has ")
    (artifact / "tokenizer.json").write_text("{ }")
    assert str(now()).startswith("artifact ")


def test_unwritable_output_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ResultsError, match="cannot write"):
        ResultsFile(tmp_path / "none" / "out.jsonl", PROMPTS, IDENTITY)


def test_a_disk_that_is_full_at_the_end_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    results = ResultsFile(tmp_path / "out.jsonl", PROMPTS, IDENTITY)
    results.add({"index": 0, "text": "a"})
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ResultsError, match=r"cannot write .*out.jsonl: No space .*; .* continue with --resume"):
        results.close()
