"""`llmc completion`: bash completes with its script, and other shells read theirs."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from llmc.cli.main import main


@pytest.fixture
def scripts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """A folder with the scripts of all shells."""
    for shell in ("bash", "zsh", "fish"):
        assert main(["completion", shell]) == 0
        (tmp_path / f"llmc.{shell}").write_text(capsys.readouterr().out)
    return tmp_path


def bash(script: Path, words: list[str], folder: Path) -> list[str]:
    """What bash offers for the last of `words`, typed in `folder`."""
    typed = " ".join(map(shlex.quote, words))
    program = (
        f"source {shlex.quote(str(script))}; COMP_WORDS=({typed}); COMP_CWORD={len(words) - 1}; "
        'COMP_LINE="${COMP_WORDS[*]}"; COMP_POINT=${#COMP_LINE}; '
        "$(complete -p llmc | sed 's/.*-F \\([^ ]*\\) .*/\\1/'); printf '%s\\n' \"${COMPREPLY[@]}\""
    )
    shown = subprocess.run(
        ["bash", "--norc", "-u", "-c", program], cwd=folder, capture_output=True, text=True, timeout=60, check=False
    )
    assert (shown.returncode, shown.stderr) == (0, "")
    return sorted(filter(None, shown.stdout.split("\n")))


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("b", ["bench", "buckets", "bundle"]),
        ("--v", ["--version"]),
        ("serve --warm-", ["--warm-order", "--warm-trace"]),
        ("buckets sh", ["show"]),
        ("inspect art --format ", ["dot", "json", "onnx", "text"]),
        ("inspect art --format = js", ["json"]),
        ("serve --miss-policy s", ["split"]),
        ("completion ", ["bash", "fish", "zsh"]),
        # A folder goes on, an artifact is complete, a file is no artifact.
        ("inspect ", ["a.llmc", "models/"]),
        ("serve --port 9000 m", ["models/"]),
        ("serve models/", ["models/a.gguf", "models/two\\ words/"]),
        ("run a.llmc --prompts n", ["notes.txt"]),
        ("compile models -o m", ["models/"]),
        ("serve --port ", []),
        ("run a.llmc ", []),
        ("bundle create a.llmc a", ["a.llmc"]),
    ],
)
def test_bash_completes(typed: str, offered: list[str], scripts: Path, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    for name in ("a.llmc", "models/two words"):
        (folder / name).mkdir(parents=True)
    for name in ("a.llmc/graphs.bin", "models/a.gguf", "notes.txt"):
        (folder / name).write_text("")
    words = typed.split(" ")
    assert bash(scripts / "llmc.bash", ["llmc", *words], folder) == offered


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shells_read_their_scripts(shell: str, scripts: Path) -> None:
    script = scripts / f"llmc.{shell}"
    assert "--kv-bytes" in script.read_text() or "-l kv-bytes" in script.read_text()
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    read = subprocess.run([shell, "-n", script], capture_output=True, text=True, timeout=60, check=False)
    assert (read.returncode, read.stderr) == (0, "")


def test_zsh_defines_its_functions(scripts: Path) -> None:
    if shutil.which("zsh") is None:
        pytest.skip("zsh is not installed")
    program = f"autoload -Uz compinit && compinit -D -u; source {scripts}/llmc.zsh; print $_comps[llmc]"
    program += "; whence _llmc_cache_ls"
    shown = subprocess.run(["zsh", "-f", "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert shown.stdout.split() == ["_llmc", "_llmc_cache_ls"], shown.stderr


def test_fish_completes(scripts: Path) -> None:
    if shutil.which("fish") is None:
        pytest.skip("fish is not installed")
    for typed, offered in (("llmc cache sh", "show"), ("llmc inspect a --format js", "json")):
        program = f"source {scripts}/llmc.fish; complete -C {shlex.quote(typed)}"
        shown = subprocess.run(["fish", "-N", "-c", program], capture_output=True, text=True, timeout=60, check=False)
        assert offered in shown.stdout.split(), shown.stderr


def test_another_shell_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "tcsh"]) == 2
    assert "'tcsh' is not one of 'bash', 'zsh', 'fish'" in capsys.readouterr().err
