"""Markdown that generated pages are written in."""

from __future__ import annotations

import re
from collections.abc import Sequence


def prose(text: str) -> str:
    """`text` as Markdown in which nothing is a mark but code in backticks; its lines and paragraphs stay."""
    parts = re.split(r"(`[^`\n]+`)", text)
    return "".join(part if i % 2 else re.sub(r"([\\*_<\[\]])", r"\\\1", part) for i, part in enumerate(parts))


def cell(text: str) -> str:
    """The same as a cell of a table: one line, and bars are no ends of cells."""
    return " ".join(prose(text).split()).replace("|", "\\|")


def code(text: str) -> str:
    """`text` as code in a cell of a table."""
    return "`" + text.replace("|", "\\|") + "`"


def heading(level: int, text: str, anchor: str | None = None) -> str:
    """A heading; anchor: the id that links to it have, where it is not the heading's own."""
    return f"{'#' * level} {text}" + (f" {{ #{anchor} }}" if anchor else "")


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of cells."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
