"""Accessible tables: a caption, scoped headings, and a region that scrolls by keyboard."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape


@dataclass(frozen=True)
class Column:
    """words: text is left-aligned, numbers right. help: meaning of the figures, shown on hovering the heading."""

    name: str
    words: bool = False
    help: str = ""


@dataclass(frozen=True)
class Row:
    """cells: one text per column; the first names the row. best: which cells are marked. help: as in Column. last: a
    rule follows."""

    cells: Sequence[str]
    best: frozenset[int] = frozenset()
    help: str = ""
    last: bool = False


def table(
    caption: str, columns: Sequence[Column], rows: Iterable[Row], *, tall: bool = False, hide: bool = False
) -> str:
    """tall: scrolls within a part of the page. hide: collapsed, for data that a picture already shows."""
    head = "".join(_heading(column) for column in columns)
    body = "".join(_row(row, columns) for row in rows)
    tag = (
        f'<div class="scroll table{" tall" if tall else ""}" role="region" tabindex="0" aria-label="{escape(caption)}">'
        f"<table><caption>{escape(caption)}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )
    return f"<details><summary>{escape(caption)}, as a table</summary>{tag}</details>" if hide else tag


def _heading(column: Column) -> str:
    title = f' title="{escape(column.help)}"' if column.help else ""
    words = ' class="words"' if column.words else ""
    return f'<th scope="col"{words}{title}>{escape(column.name)}</th>'


def _row(row: Row, columns: Sequence[Column]) -> str:
    cells = [f'<th scope="row">{escape(row.cells[0])}</th>']
    for index, (text, column) in enumerate(zip(row.cells[1:], columns[1:], strict=True), 1):
        names = [name for name, on in (("best", index in row.best), ("words", column.words)) if on]
        marks = f' class="{" ".join(names)}"' if names else ""
        cells.append(f"<td{marks}>{escape(text)}</td>")
    attributes = (' class="last"' if row.last else "") + (f' title="{escape(row.help)}"' if row.help else "")
    return f"<tr{attributes}>{''.join(cells)}</tr>"
