"""`llmc` alone: what lies in the directory decides what comes next, and what is shown can be typed."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import typer

from llmc.cli.main import build_app, main


@pytest.fixture
def shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    """What it prints in `tmp_path`; whoever asks for it has put files there before, by `files`."""
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("LLMC_CACHE_DIR", str(tmp_path / "cache"))
    assert main([]) == 0
    return capsys.readouterr().out


@pytest.fixture
def files(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    for name in request.param:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")


@pytest.mark.parametrize(
    ("files", "expected", "absent"),
    [
        ([], ["No artifact and no model here yet", "llmc compile Qwen/Qwen3-0.6B"], ["cache ls"]),
        (["here/m/config.json"], ["No artifact here yet", "llmc compile m -o model.llmc"], ["llmc serve"]),
        (["here/a.gguf"], ["llmc compile a.gguf -o"], []),
        (
            ["here/out/my model/graphs.bin", "here/m/config.json", "here/out/.staging/graphs.bin"],
            ["llmc run 'out/my model' --prompt", "llmc serve 'out/my model'"],
            ["llmc compile ", "staging"],
        ),
        (["here/graphs.bin", "here/config.json"], ["llmc run . --prompt"], []),
        ([f"here/{i}/graphs.bin" for i in range(7)], ["and 2 more"], ["  6\n"]),
        (["cache/artifacts/k/graphs.bin"], ["The cache has 1 model that was compiled on the way: llmc cache ls"], []),
    ],
    indirect=["files"],
)
@pytest.mark.usefixtures("files")
def test_it_says_what_comes_next(expected: list[str], absent: list[str], shown: str) -> None:
    assert [text for text in expected if text not in shown] == []
    assert [text for text in absent if text in shown] == []
    commands = re.findall(r"(?m)^  llmc (.*?)(?:  |$)", shown)
    known = typer.main.get_command(build_app()).commands  # type: ignore[attr-defined]
    for line in commands:
        name, *words = shlex.split(line)
        if name == "--help":
            continue
        options = {option for param in known[name].params for option in param.opts}
        assert {word for word in words if word.startswith("-")} <= options, line


@pytest.mark.parametrize("files", [["here/m/config.json"]], indirect=True)
@pytest.mark.usefixtures("files")
def test_a_directory_that_cannot_be_read_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(Path, "iterdir", lambda path: (_ for _ in ()).throw(PermissionError(13, "denied", str(path))))
    assert main([]) == 0
    assert "No artifact and no model here yet" in capsys.readouterr().out
