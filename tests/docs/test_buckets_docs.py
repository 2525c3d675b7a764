"""The commands of docs/buckets.md run as shown, if they need no compiled model and no server; its pictures exist."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import numpy as np
import pytest

from llmc.buckets.bucket import Bucket
from llmc.buckets.misses import Miss, append_misses
from llmc.buckets.trace import Trace, write_trace
from llmc.cli.main import main

from support.paths import ROOT

PAGE = (ROOT / "docs" / "buckets.md").read_text(encoding="utf-8")
COMMANDS = [
    line.strip()
    for line in re.findall(r"^    (llmc buckets .*)$", PAGE, re.MULTILINE)
    if "qwen.llmc" not in line and "--url" not in line
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("docs")
    rng = np.random.default_rng(0)
    count = 120
    trace = Trace(
        "trace", np.arange(count, dtype=np.float64) * 0.5, rng.integers(16, 3000, count), rng.integers(2, 60, count)
    )
    write_trace(root / "trace.jsonl", trace)
    (root / "gaudi.env").write_text("VLLM_BUCKETING_STRATEGY=lin\nVLLM_PROMPT_QUERY_BUCKET_MAX=1024\n")
    append_misses(root / "misses.jsonl", [Miss(1.0, "decode", 9, 9, 700, Bucket("decode", 16, 1024))])
    return root


def test_there_are_commands_of_each_kind() -> None:
    assert {command.split()[2] for command in COMMANDS} == {"plan", "simulate", "show", "misses", "import"}


# In the order of the page: the plan writes the file that the others read.
def test_the_commands_run(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(folder)
    for command in COMMANDS:
        assert main(shlex.split(command)[1:]) == 0, f"{command}: {capsys.readouterr().err}"
        assert capsys.readouterr().out
    assert (folder / "report.html").is_file()


def test_the_pictures_exist() -> None:
    pictures = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", PAGE)
    assert "images/buckets-report.png" in pictures
    assert [name for name in pictures if not (ROOT / "docs" / name).is_file()] == []
