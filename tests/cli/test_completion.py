"""`llmc completion`: bash completes with its script, and other shells read theirs."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from llmc.cli.main import build_app, main
from llmc.cli.render.completion.known_values import _OF_ALL, _OF_COMMANDS
from llmc.cli.render.completion.words import Value, command_words
from llmc.kv_dtypes import KV_DTYPES
from llmc.quantize import SCHEMES
from llmc.runtime.server.reasoning import STYLES
from llmc.runtime.server.tools.registry import TOOL_PARSERS
from llmc.task_names import POOLINGS, RANK_PROMPTS, TASKS


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
        ("serve --warm-order m", ["max_bs", "min_tokens"]),
        ("serve --overlap-sums ", ["auto", "off"]),
        ("compile m --quant w4", ["w4a16", "w4a8"]),
        ("compile m --group-size ", ["-1", "128", "32", "64"]),
        ("quantize m --dtype b", ["bf16"]),
        ("quantize m -o o --format g", ["gguf", "gptq"]),
        ("targets reference-", ["reference-aarch64"]),
        # bash takes the words apart, and replaces what is behind the last colon.
        ("compile m --target = cuda : sm_90", ["sm_90", "sm_90a"]),
        ("compile m --target cuda : sm_90 --quant nf", ["nf4"]),
        ("compile m --target cuda : sm_90 -o m", ["models/"]),
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


@pytest.fixture(scope="module")
def offered() -> dict[tuple[str, ...], tuple[str, ...]]:
    """Choices by command and name of an option."""
    return {
        (*command.path, name): option.choices
        for command in command_words(typer.main.get_command(build_app()))
        for option in command.options
        for name in option.names
        if option.value is Value.CHOICES
    }


def test_values_of_registries_are_offered(offered: dict[tuple[str, ...], tuple[str, ...]]) -> None:
    for command in (("compile",), ("cache", "why")):
        assert offered[*command, "--quant"] == tuple(SCHEMES)
        assert offered[*command, "--kv-dtype"] == ("auto", *KV_DTYPES)
        assert {"native", "znver4", "reference", "opencl", "cuda:sm_90"} < {*offered[*command, "--target"]}
        assert offered[*command, "--task"] == TASKS
        assert offered[*command, "--pooling"] == POOLINGS
        assert offered[*command, "--rank-prompt"] == RANK_PROMPTS
    assert offered["serve", "--tool-call-parser"] == ("auto", "none", *TOOL_PARSERS)
    assert offered["serve", "--reasoning-parser"] == ("auto", "none", *STYLES)
    assert "trace" in offered["serve", "--uvicorn-log-level"]
    assert "trace" not in offered["route", "--log-level"]
    assert offered["quantize", "--schemes"] == ("none", *SCHEMES)


def test_what_is_offered_belongs_to_an_option(offered: dict[tuple[str, ...], tuple[str, ...]]) -> None:
    names = {key[-1] for key in offered}
    assert {*_OF_ALL} <= names
    assert {key for key in _OF_COMMANDS if key[-1].startswith("-")} <= {*offered}


def test_a_script_is_printed_without_the_compiler() -> None:
    heavy, small = "'torch', 'tvm', 'transformers', 'onnx'", "'safetensors', 'scipy', 'ml_dtypes'"
    for missing, has_targets in ((heavy, True), (f"{heavy}, {small}", False)):
        code = f"import sys; sys.modules.update(dict.fromkeys(({missing}))); from llmc.cli.main import main"
        code += "; sys.exit(main(['completion', 'bash']))"
        shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
        assert (shown.returncode, shown.stderr) == (0, "")
        assert "iq4_nl" in shown.stdout
        assert ("cuda:sm_90a" in shown.stdout) == has_targets


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
    # A colon would end the list.
    assert r" cuda\:sm_90 " in (scripts / "llmc.zsh").read_text()


def test_fish_completes(scripts: Path) -> None:
    if shutil.which("fish") is None:
        pytest.skip("fish is not installed")
    for typed, offered in (
        ("llmc cache sh", "show"),
        ("llmc inspect a --format js", "json"),
        ("llmc compile a --target cuda:sm_90", "cuda:sm_90a"),
    ):
        program = f"source {scripts}/llmc.fish; complete -C {shlex.quote(typed)}"
        shown = subprocess.run(["fish", "-N", "-c", program], capture_output=True, text=True, timeout=60, check=False)
        assert offered in shown.stdout.split(), shown.stderr


def test_another_shell_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "tcsh"]) == 2
    assert "'tcsh' is not one of 'bash', 'zsh', 'fish'" in capsys.readouterr().err
