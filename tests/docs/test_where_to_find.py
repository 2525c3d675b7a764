"""docs/architecture.md leads from what users see to its code in two opens."""

from __future__ import annotations

import re

import pytest

from llmc.cli.main import COMMANDS

from support.paths import ROOT

PAGE = (ROOT / "docs/architecture.md").read_text(encoding="utf-8").partition("## Where to find it")[2]
ROWS = re.findall(r"^\| (.*) \| `(.*)` \| `(.*)` \|$", PAGE, re.MULTILINE)


def test_each_row_is_one_behaviour() -> None:
    assert len(ROWS) == PAGE.count("\n| ") - 1 > 40
    assert len({what for what, *_ in ROWS}) == len(ROWS)


@pytest.mark.parametrize(("what", "first", "then"), ROWS, ids=[what for what, *_ in ROWS])
def test_the_first_file_names_the_second(what: str, first: str, then: str) -> None:
    second = ROOT / then
    assert second.is_file()
    assert re.search(rf"\b{second.stem}\b", (ROOT / first).read_text(encoding="utf-8")), f"{first} does not name {then}"


def test_each_command_is_a_file_of_its_name() -> None:
    assert [name for name in COMMANDS if not (ROOT / "cli" / f"{name}.py").is_file()] == []
