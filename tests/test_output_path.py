"""Paths of results, reports and logs are checked before anything is loaded."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from llmc.cli.main import main
from llmc.output_path import OutputError, check_outputs


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Holds a file, a directory, a pipe that nobody reads, and links to the file and to none."""
    (tmp_path / "file").write_text("kept")
    (tmp_path / "directory").mkdir()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("file")
    (tmp_path / "dangling").symlink_to("directory/new")
    return tmp_path


def test_what_can_be_written_is_left_alone(folder: Path) -> None:
    before = sorted(folder.rglob("*"))
    for name in ("file", "new", "pipe", "link", "dangling", "directory/new", "/dev/null"):
        check_outputs({"-o": folder / name}, appended={"--log": folder / name})
    for name in ("directory", "new", "new/below/that"):
        check_outputs({}, folders={"--dir": folder / name})
    check_outputs({"-o": None}, appended={"--log": None}, folders={"--dir": None})
    assert sorted(folder.rglob("*")) == before
    assert (folder / "file").read_text() == "kept"


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("directory", "it is a directory"),
        ("none/file", "there is no directory"),
        ("file/below", "Not a directory"),
        ("x" * 300, "File name too long"),
        ("/proc/x", "No such file or directory"),
    ],
)
def test_what_cannot_be_written_is_one_sentence(folder: Path, name: str, why: str) -> None:
    for kind in ("replaced", "appended"):
        with pytest.raises(OutputError) as error:
            check_outputs(**{"replaced": {}, kind: {"--html": folder / name}})
        assert str(error.value).startswith(f"cannot write --html {folder / name}: {why}")
        assert str(error.value).endswith("; name another path")
    for folders in ("file", "file/below", "/proc/x"):
        with pytest.raises(OutputError, match=r"cannot write --dir .*; name another path"):
            check_outputs({}, folders={"--dir": folder / folders})


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_rights_count(folder: Path) -> None:
    (folder / "file").chmod(0o444)
    check_outputs({"--html": folder / "file"})
    with pytest.raises(OutputError, match="Permission denied"):
        check_outputs({}, appended={"--log": folder / "file"})
    (folder / "directory").chmod(0o555)
    with pytest.raises(OutputError, match="Permission denied"):
        check_outputs({"--html": folder / "directory/new"})


@pytest.mark.parametrize(
    ("command", "flag"),
    [
        ("run MODEL --prompt x", "--output"),
        ("run MODEL --prompt x --resume", "--output"),
        ("embed MODEL --prompt x", "--output"),
        ("serve MODEL", "--access-log-file"),
        ("serve MODEL", "--record-trace"),
        ("serve MODEL", "--profiler-dir"),
        ("chat MODEL", "--history"),
        ("bench latency MODEL", "--output"),
        ("bench throughput MODEL", "--html"),
        ("bench serve", "--output"),
        ("bench serve", "--html"),
        ("profile MODEL", "--trace"),
        ("profile MODEL", "--html"),
        ("inspect MODEL", "--output"),
        ("inspect MODEL", "--html"),
        ("eval perplexity MODEL --text MODEL", "--html"),
        ("eval kl MODEL --against MODEL --text MODEL", "--html"),
        ("eval tasks MODEL --tasks x", "--html"),
        ("buckets plan --trace MODEL", "--output"),
        ("buckets simulate --trace MODEL --buckets MODEL", "--html"),
    ],
)
def test_commands_check_before_they_load(
    command: str, flag: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # A model that is not there would be named first, were it looked for first.
    (tmp_path / "file").write_text("")
    argv = [word.replace("MODEL", str(tmp_path / "none")) for word in command.split()]
    path = tmp_path / "file/below.json"
    assert main([*argv, flag, str(path)]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"llmc: error: cannot write {flag} {path}: ")
    assert error.endswith("ot a directory; name another path\n")


def test_run_names_earlier_results_before_it_loads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "out.jsonl").write_text("{}\n")
    command = ["run", str(tmp_path / "none"), "--prompt", "x", "-o", str(tmp_path / "out.jsonl")]
    assert main(command) == 1
    assert "out.jsonl exists: pass --resume to continue it or --overwrite" in capsys.readouterr().err
