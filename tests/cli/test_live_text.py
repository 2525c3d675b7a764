"""`llmc run` prints texts while their tokens come, in the order of the prompts."""

from __future__ import annotations

import io
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from llmc.cli.main import main
from llmc.cli.render.live_text import LiveText
from llmc.runtime.outputs import TokenDelta

from support.fake_llm import FakeEngine, FakeLLM
from support.manifests import edit_manifest


def delta(index: int, text: str, end: str | None = None, output_index: int = 0) -> TokenDelta:
    return TokenDelta(index, output_index, text, (1,), finish_reason=end)


def test_a_text_is_there_at_once_and_later_ones_wait_for_their_turn() -> None:
    out = io.StringIO()
    live = LiveText(["A:", "B:"], 2, out)
    shown = []
    for told in (
        delta(0, "x"), delta(1, "p", "stop"), delta(0, "1", output_index=1), delta(0, "y", "stop"),
        delta(0, "2", "length", output_index=1), delta(1, "q", output_index=1), delta(1, "", "stop", output_index=1),
    ):  # fmt: skip
        live.take(told)
        shown.append(out.getvalue())
    assert shown == [
        "A:x", "A:x", "A:x", "A:xy\nA:1", "A:xy\nA:12\nB:p\n", "A:xy\nA:12\nB:p\nB:q", "A:xy\nA:12\nB:p\nB:q\n"
    ]  # fmt: skip
    live.close()
    assert out.getvalue() == shown[-1]


def test_without_a_tokenizer_there_are_token_ids(
    chat_artifact: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt_token_ids": [5, 6]}\n' * 2)
    command = ["run", str(chat_artifact), "--prompts", str(prompts), "--max-tokens", "4", "--ignore-eos"]
    assert main([*command, "--temperature", "0"]) == 0
    with_text = capsys.readouterr().out
    bare = shutil.copytree(chat_artifact, tmp_path / "bare")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (bare / name).unlink(missing_ok=True)
    edit_manifest(bare, files={})
    assert main(["run", str(bare), *command[2:], "--temperature", "0"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [len(line.split()) for line in lines] == [4, 4]
    assert all(word.isdigit() for line in lines for word in line.split())
    assert "\n".join(lines) != with_text


Run = Callable[..., int]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """`llmc run` on an engine made of Python."""

    def run(*arguments: str, engine: FakeEngine) -> int:
        (tmp_path / "graphs.bin").touch()
        monkeypatch.setattr("llmc.runtime.llm.LLM", lambda path, **options: FakeLLM(engine, tmp_path))
        return main(["run", str(tmp_path), *arguments])

    return run


def test_tokens_are_printed_as_they_come(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    seen = []

    class Watched(FakeEngine):
        def step(self) -> bool:
            seen.append(capsys.readouterr().out)
            return super().step()

    code = run("--prompt", "abc", "--max-tokens", "4", engine=Watched())
    rest = capsys.readouterr()
    assert code == 0
    assert seen == ["", "abcc", "b", "a"]
    assert (rest.out, rest.err) == ("c\n", "")


def test_internals_are_told_when_asked_for(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--prompt", "ab", "--max-tokens", "2", "--stats", engine=FakeEngine()) == 0
    told = capsys.readouterr()
    assert told.out == "abba\n"
    assert re.search(r"padding waste +25.0%", told.err)
    assert "TTFT" in told.err


def test_an_interruption_keeps_what_was_printed(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    engine = FakeEngine(interrupt_after=4)
    assert run("--prompt", "abc", "--prompt", "xyz", "--max-tokens", "9", engine=engine) == 130
    told = capsys.readouterr()
    assert told.out == "abccba\n"
    assert "Traceback" not in told.err
    assert engine.cancelled == [1, 2]


def test_a_failure_is_told_on_stderr_behind_its_text(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    engine = FakeEngine(failing={ord("x"): 11})
    assert run("--prompt", "abc", "--prompt", "xyz", "--max-tokens", "3", engine=engine) == 1
    told = capsys.readouterr()
    assert told.out == "abccba\nxyzzy\n"
    assert told.err.startswith("llmc: error: 1 of 2 prompts failed, the first is 1: the request failed after")
