"""Sentences of Markdown pages, of docstrings and of comments: what a reader reads at one breath."""

from __future__ import annotations

import re
from collections.abc import Iterator

_BLOCKS = re.compile(r"^[ ]*```.*?^[ ]*```[ ]*$|<!--.*?-->", re.MULTILINE | re.DOTALL)
_ITEM = re.compile(r"(?:[-*+]|\d+\.) ")
_CELL_END = re.compile(r"(?<!\\)\|")
_LINK = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")
# An end, with what may close behind it. What follows must look like a beginning: "e.g. this" goes on.
# A sentence may begin with a name that has an underscore, and with `name:` of a field.
_END = re.compile(
    r"(?:(?<=[.!?])|(?<=[.!?][\")*_]))\s+(?=[\"(*_`\[]*[A-Z0-9]|[a-z0-9]+_|[a-z_0-9]+(?:, [a-z_0-9]+)*: )"
)


def sentences(text: str) -> Iterator[str]:
    """The sentences of a Markdown text, without blocks of code, tables, headings and quotations. An item of a list is
    a paragraph; a piece of code is one word."""
    for paragraph in _paragraphs(_BLOCKS.sub("\n", text)):
        yield from (sentence for sentence in _END.split(_plain(paragraph)) if sentence)


def sentences_of_tables(text: str) -> Iterator[str]:
    """The sentences in cells of a Markdown text's tables. A cell is a paragraph."""
    for line in _BLOCKS.sub("\n", text).splitlines():
        if line.strip().startswith("|"):
            # Code first: a bar in it ends no cell.
            for cell in _CELL_END.split(_plain(line).strip().strip("|")):
                yield from (sentence for sentence in _END.split(cell.strip()) if sentence)


def num_words(sentence: str) -> int:
    """Words, where punctuation by itself is none."""
    return sum(1 for word in sentence.split() if re.search(r"\w", word))


def _plain(text: str) -> str:
    """Without marks of code and links. Code comes first: what stands in it ends no sentence."""
    return _LINK.sub(r"\1", re.sub(r"`[^`]*`", "Code", text))


def _paragraphs(text: str) -> Iterator[str]:
    lines: list[str] = []
    in_list = after_blank = False
    for line in text.splitlines():
        stripped = line.strip()
        if _ITEM.match(stripped):
            yield from _joined(lines)
            lines, in_list = [_ITEM.sub("", stripped, count=1)], True
        elif not stripped or stripped.startswith(("|", "#", ">")):
            yield from _joined(lines)
            lines = []
        elif not in_list and line.startswith("    ") and not lines:
            continue  # an indented block of code
        else:
            if after_blank and not line.startswith(" "):
                in_list = False
            lines.append(stripped)
        after_blank = not stripped
    yield from _joined(lines)


def _joined(lines: list[str]) -> Iterator[str]:
    if lines:
        yield " ".join(lines)
