"""The recorded terminal of README is what docs/draw_terminal.py runs: a killed replica, and the same bytes."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

from docs.draw_terminal import PICTURE, SESSION, draw


def lines_of(picture: str) -> list[str]:
    root = ElementTree.fromstring(picture)
    return ["".join(text.itertext()) for text in root.iter("{http://www.w3.org/2000/svg}text")]


def test_the_picture_is_of_the_session() -> None:
    lines = lines_of(PICTURE.read_text(encoding="utf-8"))
    assert [line for line in lines if line.startswith("$ ")] == [f"$ {command}" for command in SESSION]
    assert "llmc_router_failovers_total 1.0" in lines
    assert lines[-1].startswith("Both have the same bytes: ")


def test_what_a_command_prints_is_text() -> None:
    assert lines_of(draw(["a && b", "c"], [["<x>", ""], []])) == ["$ a && b", "<x>", "$ c"]
