"""docs/reports.md is true: its commands run and write pages, its pictures and links are there."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from llmc.cli import main as cli

from support.paths import ROOT

PAGE = (ROOT / "docs" / "reports.md").read_text(encoding="utf-8")
# A server, another model and a harness are tested where they belong.
ELSEWHERE = ("bench serve", "eval kl", "eval tasks")


def test_commands_write_pages(
    english_artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("held-out.txt").write_text("A walk before dinner does no harm, she said, and it did her much good. " * 4)
    places = {"out/tiny-english": str(english_artifact), "out/tiny": str(english_artifact), "64": "4"}
    lines = [line for line in re.findall(r"^ {4}llmc (.*)$", PAGE, re.MULTILINE) if not line.startswith(ELSEWHERE)]
    assert len(lines) == 7
    for line in lines:
        command, _, printed = line.partition(" > ")
        words = [places.get(word, word) for word in shlex.split(command)]
        assert cli.main(words) == 0, line
        text = capsys.readouterr().out
        if printed:
            Path(printed).write_text(text)
        if "--html" in words:
            assert Path(words[words.index("--html") + 1]).read_text(encoding="utf-8").startswith("<!doctype html>")


def test_every_command_with_a_report_is_there() -> None:
    from typer.testing import CliRunner

    app = cli.build_app()
    for words in (
        ["profile"], ["inspect"], ["bench", "serve"], ["bench", "latency"], ["bench", "throughput"],
        ["eval", "perplexity"], ["eval", "kl"], ["eval", "tasks"], ["buckets", "simulate"],
    ):  # fmt: skip
        assert "--html" in CliRunner().invoke(app, [*words, "--help"]).output, words
        assert f"`llmc {words[0]}" in PAGE
