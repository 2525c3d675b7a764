"""--help at 80 columns, and what a mistaken path is told."""

from __future__ import annotations

import json
import re
import zipfile
from pathlib import Path
from typing import Any

import pytest
import typer

from llmc.cli import main as cli
from llmc.cli.render.help_layout import HEADINGS, SUMMARIES
from llmc.cli.serve import _compile
from llmc.mistaken_path import meant
from llmc.runtime.llm import LLM

# Capitals, several of them, or choices: FILE|ARTIFACT, ID=BIAS, auto|none.
VALUE_NAME = re.compile(r"[A-Z]+(?:[=:|][A-Z]+)*…?|[a-z_0-9]+(?:\|[a-zA-Z_0-9]+)+")


def commands() -> dict[str, Any]:
    """Every command by its name, as in "cache ls"."""
    found: dict[str, Any] = {}
    for name, command in typer.main.get_command(cli.build_app()).commands.items():  # type: ignore[attr-defined]
        children = getattr(command, "commands", None)
        found |= {f"{name} {child}": of for child, of in children.items()} if children else {name: command}
    return found


COMMANDS = commands()


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


@pytest.mark.usefixtures("narrow")
@pytest.mark.parametrize("group", ["", *sorted({name.split()[0] for name in COMMANDS if " " in name})])
def test_no_summary_is_cut(group: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*group.split(), "--help"]) == 0
    text = capsys.readouterr().out
    listed = text[text.index("Commands:") :].splitlines()[1:]
    names = [line.split()[0] for line in listed if line.strip()]
    assert set(names) == {name.removeprefix(group).split()[0] for name in COMMANDS if name.startswith(group)}
    assert not [line for line in listed if line.endswith("...") or len(line) > 80]


def test_every_command_has_a_summary() -> None:
    assert set(COMMANDS) <= set(SUMMARIES)


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_values_have_names_of_one_kind(name: str) -> None:
    params = [p for p in COMMANDS[name].params if not getattr(p, "is_flag", False)]
    wrong = {p.name: p.metavar for p in params if not VALUE_NAME.fullmatch(p.metavar or "")}
    assert not wrong
    options = [p for p in params if p.param_type_name == "option"]
    letters = {p.metavar for p in options if len(p.metavar) == 1}
    assert letters <= {"N", "X", "S"}, "whole numbers, numbers and seconds"


@pytest.mark.parametrize("name", sorted(HEADINGS))
def test_long_commands_have_headings(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    params = {param.name: param for param in COMMANDS[name].params}
    under = [param for names in HEADINGS[name].values() for param in names]
    assert len(set(under)) == len(under)
    assert set(under) <= set(params), "headings name options that exist"
    left = [p for p in params.values() if p.param_type_name == "option" and p.name not in under]
    assert len(left) <= 8, "what stands under no heading is the exception"
    assert cli.main([*name.split(), "--help"]) == 0
    text = capsys.readouterr().out
    assert all(f"\n{heading}:\n" in text for heading in HEADINGS[name])
    for param in params.values():
        if param.param_type_name == "option":
            assert re.search(rf"(?m)^  (?:-\w, )?{param.opts[0]}\b", text), param.opts


def test_commands_with_many_options_have_headings() -> None:
    many = {name for name, command in COMMANDS.items() if len(command.params) > 10}
    assert many <= set(HEADINGS)


@pytest.mark.parametrize(
    ("given", "fragment"),
    [
        ("localhost:9", "llmc chat http://localhost:9"),
        ("127.0.0.1:8000/v1", "llmc chat http://127.0.0.1:8000/v1"),
        ("http://localhost:9/v1", "llmc chat http://localhost:9/v1"),
        ("none", "none does not exist"),
        ("a.bundle", "llmc bundle apply"),
        ("gone.gguf", "gone.gguf does not exist"),
        ("weights", "give one of them, such as weights/a.gguf"),
        ("m/model.safetensors", "directory of its model"),
        ("m/config.json", "give its directory"),
        ("notes.txt", "notes.txt is a file"),
        ("m", "no config.json"),
        ("web", "but ONNX files: give one of them, such as web/onnx/model_q4.onnx"),
        ("models--a--b", "is a folder of snapshots: give one of them, models--a--b/snapshots/1f"),
        (".", "is a folder of the hub's models: give one of them, models--a--b/snapshots/1f"),
    ],
)
def test_a_mistaken_path_is_told_what_was_meant(
    given: str, fragment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m").mkdir()
    (tmp_path / "weights").mkdir()
    for name in ("weights/a.gguf", "m/model.safetensors", "notes.txt"):
        (tmp_path / name).write_text("x")
    with zipfile.ZipFile(tmp_path / "a.bundle", "w") as archive:
        archive.writestr("bundle.json", "{}")
    (tmp_path / "web" / "onnx").mkdir(parents=True)
    (tmp_path / "web" / "onnx" / "model_q4.onnx").write_text("x")
    snapshot = tmp_path / "models--a--b" / "snapshots" / "1f"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    if given == "m/config.json":
        (tmp_path / given).write_text("{}")
    assert fragment in meant(Path(given))
    for command in (["run", given, "--prompt", "a"], ["serve", given, "--port", "0"], ["compile", given, "-o", "out"]):
        assert cli.main(command) == 1
        errors = capsys.readouterr().err.splitlines()
        assert len(errors) == 1
        assert fragment in errors[0]


def test_sizes_are_written_alike_everywhere() -> None:
    for name, command in COMMANDS.items():
        for param in command.params:
            if param.name == "kv_bytes":
                assert param.metavar == "SIZE", name
                read = param.type.convert("1GiB", param, None)
                assert read in (1 << 30, "1GiB"), name


def test_ctrl_c_is_told_once(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """By the command, whichever version of typer catches it, and not by a child that compiles for it."""

    def interrupted(*args: object) -> Path:
        raise KeyboardInterrupt

    monkeypatch.setattr("llmc.artifact_path", interrupted)
    assert cli.main(["run", "x", "--prompt", "a"]) == 130
    assert capsys.readouterr().err == "llmc: error: interrupted\n"
    assert _compile("x") == 130
    assert "interrupted" not in capsys.readouterr().err


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_no_option_takes_nan(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = COMMANDS[name]
    for param in command.params:
        if getattr(param.type, "name", "").startswith("float"):
            needed = [str(tmp_path) for p in command.params if p.param_type_name == "argument" and p.required]
            others = [
                o for p in command.params if p.required and p.param_type_name == "option" for o in (p.opts[0], "x")
            ]
            assert cli.main([*name.split(), *needed, *others, f"{param.opts[0]}=nan"]) == 2, param.opts
            assert param.opts[0] in capsys.readouterr().err


def test_run_cuts_max_tokens_as_its_help_says(chat_artifact: Path, capsys: pytest.CaptureFixture[str]) -> None:
    option = next(param for param in COMMANDS["run"].params if param.name == "max_tokens")
    assert option.help == "Longest output, in tokens; cut to the context that is left."
    command = ["run", str(chat_artifact), "--prompt", "a", "--max-tokens", "5000", "--ignore-eos", "--json"]
    assert cli.main([*command, "--threads", "1", "-q"]) == 0
    (result,) = json.loads(capsys.readouterr().out)["results"]
    assert result["finish_reason"] == "length"
    with LLM(chat_artifact, num_threads=1) as llm:
        assert result["usage"]["prompt_tokens"] + len(result["token_ids"]) == llm.max_model_len
