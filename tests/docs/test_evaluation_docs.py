"""docs/evaluation.md is true: what needs no harness runs, the tasks and options that it names are there."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from llmc.cli import main as cli
from llmc.runtime.eval.local_tasks import LOCAL_TASKS

from support.paths import ROOT

PAGE = (ROOT / "docs" / "evaluation.md").read_text(encoding="utf-8")
TEXT = "It was a truth which nobody at Longbourn cared to deny, that a walk before dinner does no harm. " * 3


def commands() -> list[list[str]]:
    return [shlex.split(line)[1:] for line in re.findall(r"^(?: {4})?(llmc eval .*)$", PAGE, re.MULTILINE)]


def test_commands_on_a_text_run(
    english_artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # Compiled already: it is compared with itself.
    monkeypatch.setattr("llmc.compiler.pipeline.compile_cached", lambda *arguments: english_artifact)
    (tmp_path / "held-out.txt").write_text(TEXT)
    places = {
        "out/tiny": str(english_artifact),
        "out/tiny-w4a8": str(english_artifact),
        "examples/tiny-english": str(ROOT / "examples" / "tiny-english"),
        "held-out.txt": str(tmp_path / "held-out.txt"),
    }
    run = [command for command in commands() if command[1] != "tasks"]
    assert [command[1] for command in run] == ["perplexity", "perplexity", "kl", "kl"]
    for command in run:
        assert cli.main([places.get(word, word) for word in command]) == 0, command
    said = capsys.readouterr().out
    assert said.count("mean KL          0.000000 ± 0.000000") == 2
    pairs = re.findall(r"^perplexity {7}(\S+), of the reference (\S+)$", said, re.MULTILINE)
    assert len(pairs) == 2
    assert all(own == reference and float(own) > 1 for own, reference in pairs)


def test_commands_of_tasks_have_options_that_there_are() -> None:
    app: Any = typer.main.get_command(cli.build_app("eval"))
    tasks = app.commands["eval"].commands["tasks"]
    options = {name for param in tasks.params for name in param.opts}
    shown = [command for command in commands() if command[1] == "tasks"]
    assert len(shown) == 5
    for command in shown:
        assert {word for word in command if word.startswith("--")} <= options, command


def test_the_tasks_are_those_there_are() -> None:
    rows = re.findall(r"^\| `(local_\w+)`.*? \| (.*?) \|", PAGE, re.MULTILINE)
    named = {task: re.findall(r"`([^`]+)`", files) for task, files in rows}
    assert list(named) == list(LOCAL_TASKS)
    for name, task in LOCAL_TASKS.items():
        assert named[name][0] == task.data
        assert task.examples is None or named[name][1] == task.examples


def test_the_task_of_a_user_is_one() -> None:
    (block,) = re.findall(r"^```yaml\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    assert yaml.safe_load(block)["task"] == "endings"
