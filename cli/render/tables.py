"""Tables without truncation: a table wider than the terminal is printed in bands of columns."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_ENDLESS = 1 << 20


def print_table(table: Table, console: Console | None = None, keys: int = 1) -> None:
    """Prints a table with every cell complete, on stdout or to `console`.

    keys: leading columns that identify a row; each band begins with them. A cell wider than the terminal continues on
    the next line. A pipe without COLUMNS has no width and gets one band. A table with a prose column, whose overflow is
    "fold", is not split: the prose takes more lines.
    """
    from llmc.cli.render.console import Console

    console = console or Console(highlight=False)
    if any(column.overflow == "fold" for column in table.columns):
        console.print(table, soft_wrap=False)
        return
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console = Console(file=console.file, highlight=False, width=max(console.width, _width(table, console)))
    for index, band in enumerate(_bands(table, console, keys)):
        if index:
            console.print()
        console.print(band, soft_wrap=False)


def _bands(table: Table, console: Console, keys: int) -> Iterator[Table]:
    rest = list(range(keys, len(table.columns)))
    title = table.title
    if not rest:
        yield _part(table, range(len(table.columns)), title)
    while rest:
        count = len(rest)
        while count > 1 and _width(_part(table, [*range(keys), *rest[:count]]), console) > console.width:
            count -= 1
        yield _part(table, [*range(keys), *rest[:count]], title)
        rest, title = rest[count:], None


def _width(table: Table, console: Console) -> int:
    """Terminal columns that the whole table needs."""
    return console.measure(table, options=console.options.update(width=_ENDLESS)).maximum


def _part(table: Table, columns: Sequence[int], title: object = None) -> Table:
    """Some columns of a table."""
    from rich.table import Table

    part = Table(
        title=title,  # type: ignore[arg-type]
        title_justify=table.title_justify,
        box=table.box,
        padding=table.padding,
        collapse_padding=table.collapse_padding,
        show_header=table.show_header,
        show_edge=table.show_edge,
        pad_edge=table.pad_edge,
    )
    chosen = [table.columns[i] for i in columns]
    for column in chosen:
        part.add_column(column.header, justify=column.justify, style=column.style, overflow="fold")
    cells = zip(*(column.cells for column in chosen), strict=True)
    for row, texts in zip(table.rows, cells, strict=True):
        part.add_row(*texts, style=row.style, end_section=row.end_section)
    return part
