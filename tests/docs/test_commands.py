"""Commands of llmc that the pages show exist, with the flags that they are given."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from llmc.cli.main import build_app

from support.paths import ROOT

PAGES = (ROOT / "README.md", ROOT / "examples" / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
_CODE = re.compile(r"^ *```[^\n]*\n(.*?)^ *```|((?:^ {4,}[^\n]*\n)+)", re.MULTILINE | re.DOTALL)
_SHOWN = re.compile(r"^\s*(?:\$ )?(?:[A-Z_]+=\S+ )*(?:mpirun [^\n]*? )?llmc ([a-z][^\n]*)$", re.MULTILINE)


def shown(page: Path) -> Iterator[list[str]]:
    """The words behind `llmc` of each command in a block of code, up to a pipe or a comment."""
    for fenced, indented in _CODE.findall(page.read_text()):
        for line in _SHOWN.findall(re.sub(r"\\\n\s*", "", fenced or indented)):
            command = re.split(r"\s(?:[|>&]|&&|2>)(?=\s|\S)", line.partition("  #")[0])[0]
            try:
                yield shlex.split(command, comments=True)
            except ValueError:  # an apostrophe: a sentence, not a command
                continue


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_and_flags_exist(page: Path) -> None:
    app: Any = typer.main.get_command(build_app())
    for words in shown(page):
        command, rest = app, list(words)
        while rest and hasattr(command, "commands"):
            assert rest[0] in command.commands, words
            command = command.commands[rest.pop(0)]
        known = {name for param in command.params for name in (*param.opts, *param.secondary_opts)}
        used = {word.partition("=")[0] for word in rest if re.fullmatch(r"--?[a-z][\w-]*(=.*)?", word)}
        assert used <= known | {"--help"}, words


def test_commands_are_found() -> None:
    assert sum(1 for page in PAGES for _ in shown(page)) > 150
