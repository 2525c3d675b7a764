"""Each option with a fixed set of values names them all when it is given another one, before anything is loaded."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import typer

from llmc.cli import main as cli
from llmc.cli.render.completion.words import Value, command_words

from support.paths import ROOT

# A number, and a bundle that names what it has.
_OTHERS = {("--group-size",), ("bundle", "apply", "--target")}
_POSITIONAL = {
    "bench serve": (), "buckets import": (), "buckets plan": ("--trace", "none"), "buckets replan": ("--trace", "none"),
    "buckets simulate": ("--trace", "none", "--buckets", "none"), "compile": ("none", "-o", "none.llmc"),
    "cache why": (str(ROOT / "examples/tiny-english"),), "run": ("none", "--prompt", "x"),
}  # fmt: skip
_WRITES = {"--scheme": (), "--method": ("--scheme", "w4a16"), "--format": ("--scheme", "w4a16")}


def options() -> Iterator[tuple[tuple[str, ...], str, tuple[str, ...]]]:
    """(command, name, values)."""
    for command in command_words(typer.main.get_command(cli.build_app())):
        for option in command.options:
            name = option.names[0]
            if option.value is Value.CHOICES and not {(name,), (*command.path, name)} & _OTHERS:
                yield command.path, name, option.choices


@pytest.mark.parametrize(
    ("path", "name", "values"), [pytest.param(*one, id=" ".join((*one[0], one[1]))) for one in options()]
)
def test_a_wrong_word_is_told_the_right_ones(
    path: tuple[str, ...], name: str, values: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    command = " ".join(path)
    argv = [*path, *_POSITIONAL.get(command, ("none",)), name, "zzz"]
    if command == "quantize" and name in _WRITES:
        argv += ["-o", "none.quantized", *_WRITES[name]]
    assert cli.main(argv) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "'zzz'" in error
    assert [value for value in values if value not in error] == []


def test_there_are_such_options() -> None:
    assert len(list(options())) > 40
