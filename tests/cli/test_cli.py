"""Exit codes, one-sentence errors and help of the command line."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer

from llmc.cli import main as cli
from llmc.cli.options.weight_memory import WeightMemory
from llmc.runtime.binding import WEIGHT_MEMORY
from llmc.units import parse_size


def one_sentence(capsys: pytest.CaptureFixture[str]) -> str:
    """The only line of stderr, without its prefix."""
    captured = capsys.readouterr()
    lines = captured.err.strip().splitlines()
    assert len(lines) == 1, captured.err
    assert lines[0].startswith("llmc: error: ")
    return lines[0]


def all_commands() -> list[str]:
    """As in "run" and "cache ls"."""
    found = []
    for name, command in typer.main.get_command(cli.build_app()).commands.items():  # type: ignore[attr-defined]
        children = getattr(command, "commands", {})
        found += [name, *(f"{name} {child}" for child in children)]
    return found


def test_all_commands_are_known() -> None:
    assert {"compile", "run", "inspect", "cache", "cache ls", "cache gc"} <= set(all_commands())


@pytest.mark.parametrize("command", ["", *all_commands()])
def test_help_has_examples(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*command.split(), "--help"]) == 0
    text = capsys.readouterr().out
    examples = text[text.index("Examples:") :].splitlines()[1:]
    shown = [line.strip() for line in examples if line.strip().startswith("llmc ")]
    assert any(line.startswith(f"llmc {command}".strip()) for line in shown), text


def test_help_lists_commands_and_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    text = capsys.readouterr().out
    assert "compile" in text
    assert "run" in text
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("llmc ")


@pytest.mark.parametrize(
    ("argv", "fragment"),
    [
        (["bogus"], "bogus"),
        (["run"], "ARTIFACT|MODEL"),
        (["run", "x", "--prompt", "a", "--bogus"], "--bogus"),
        (["run", "x", "--prompt", ""], "--prompt is empty"),
        (["run", "x", "--prompt", "a", "--max-tokens", "0"], "'--max-tokens': 0"),
        (["run", "x", "--prompt", "a", "--max-tokens=many"], "'many'"),
        (["run", "x", "--prompt", "a", "--top-p", "7"], "top_p 7.0"),
        (["run", "x", "--prompt", "a", "--temperature", "nan"], "'--temperature': nan"),
        (["run", "x", "--prompt", "a", "--min-tokens", "9", "--max-tokens", "3"], "min_tokens 9"),
        (["run", "x", "--prompt", "a", "--logit-bias", "12"], "'12'"),
        (["run", "x", "--prompt", "a", "--resume"], "--output"),
        (["run", "x", "--prompt", "a", "--miss-policy", "wait"], "'wait'"),
        (["compile", "x"], "--output"),
        (["compile", "x", "-o", "y", "--dtype", "f8"], "'f8'"),
        (["compile", "x", "-o", "y", "--block-size", "17"], "17"),
        (["compile", "x", "-o", "y", "--buckets", "prefill=1:0:4x8,decode=1x8"], "step 0"),
    ],
)
def test_wrong_usage_exits_with_2(argv: list[str], fragment: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(argv) == 2
    assert fragment in one_sentence(capsys)


@pytest.mark.parametrize(
    ("make", "fragment"),
    [(None, "does not exist"), ("empty", "neither an artifact"), ("file", "neither an artifact")],
)
def test_run_of_what_is_no_model_exits_with_1(
    make: str | None, fragment: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "model"
    if make == "empty":
        path.mkdir()
    elif make == "file":
        path.write_text("x")
    output = tmp_path / "out.jsonl"
    assert cli.main(["run", str(path), "--prompt", "a", "--output", str(output)]) == 1
    message = one_sentence(capsys)
    assert fragment in message
    assert str(path) in message
    assert not output.exists()


@pytest.mark.parametrize(
    ("names", "mark", "told"),
    [
        (("a.llmc",), "graphs.bin", "is a folder of artifacts: give one of them, {0}/a.llmc"),
        (("b", "a", "c"), "graphs.bin", "of artifacts: give one of them, {0}/a, {0}/b or {0}/c"),
        (tuple("hgfedcba"), "graphs.bin", "{0}/a, {0}/b, {0}/c, {0}/d, {0}/e, or one of 3 more"),
        (("qwen", "llama"), "config.json", "is a folder of models: give one of them, {0}/llama or {0}/qwen"),
    ],
)
def test_what_a_folder_contains_is_named(
    names: tuple[str, ...], mark: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / mark).touch()
    assert cli.main(["serve", str(tmp_path)]) == 1
    assert one_sentence(capsys).endswith(told.format(tmp_path))


def test_bad_prompts_file_exits_with_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run", str(tmp_path), "--prompts", str(tmp_path / "none.txt")]) == 1
    assert "none.txt" in one_sentence(capsys)


def failing(error: BaseException) -> object:
    def app(**kwargs: object) -> None:
        raise error

    return app


@pytest.mark.parametrize(
    ("error", "code", "fragment"),
    [
        (KeyboardInterrupt(), 130, "interrupted"),
        (FileNotFoundError(2, "No such file or directory", "/x/y"), 1, "/x/y: No such file"),
        (OSError(28, "No space left on device"), 1, "No space left"),
        (MemoryError(), 1, "out of memory"),
        (KeyError("secret"), 1, "KeyError"),
        (ValueError("two\nlines"), 1, "two lines"),
    ],
)
def test_any_error_is_one_sentence(
    error: BaseException,
    code: int,
    fragment: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(cli, "build_app", lambda command: failing(error))
    assert cli.main(["run"]) == code
    assert fragment in one_sentence(capsys)


def test_debug_lets_the_traceback_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "build_app", lambda command: failing(KeyError("secret")))
    with pytest.raises(KeyError, match="secret"):
        cli.main(["run", "--debug"])


def test_sizes_as_people_write_them() -> None:
    sizes = {"0": 0, "4096": 4096, "2GiB": 2 << 30, "1.5 MiB": 3 << 19, "500MB": 500_000_000, "3k": 3072, "7B": 7}
    assert {text: parse_size(text) for text in sizes} == sizes


@pytest.mark.parametrize("text", ["", "G", "-1", "1e9", "2 bananas", "7iB", "1 KK"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="is not a size; write bytes"):
        parse_size(text)


def test_sizes_keep_every_byte_up_to_the_largest() -> None:
    # A float would round it.
    assert parse_size("9007199254740993") == 2**53 + 1
    assert parse_size(str(2**63 - 1)) == 2**63 - 1
    for text in (str(2**63), "17179869185GiB", "9" * 400):
        with pytest.raises(typer.BadParameter, match="write at most 8388607TiB"):
            parse_size(text)


def test_errors_have_no_control_characters(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    odd = tmp_path / "\x1b[2J\x07\x9b1m"
    for argv in (["run", str(odd), "--prompt", "x"], ["inspect", str(odd)], ["compile", str(odd), "-o", str(odd)]):
        assert cli.main(argv) != 0
        assert r"\u001b[2J\u0007\u009b1m" in one_sentence(capsys)


def test_modes_of_weight_memory_are_the_engine_s() -> None:
    assert [mode.value for mode in WeightMemory] == list(WEIGHT_MEMORY)
