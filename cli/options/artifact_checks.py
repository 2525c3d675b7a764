"""What commands check of an artifact: that it opens, once it is made; every byte, where there is --verify."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from llmc.graphs_records import Tables
from llmc.runtime.checksums import verify_artifact
from llmc.runtime.graphs_checks import FormatError
from llmc.runtime.graphs_file import read_graphs
from llmc.units import format_bytes

_SHOW_PROGRESS_AFTER_S = 2.0
_SHOWN_DAMAGE = 3


def check_bytes(artifact: Path, tables: Tables | None = None) -> str:
    """Reads the whole artifact; returns the result as text. Raises FormatError that names the damaged part.

    tables: its graphs.bin if already read.
    """
    tables = read_graphs(artifact) if tables is None else tables
    with _slow_progress("verify") as progress:
        damaged = verify_artifact(artifact, tables, progress)
    if damaged:
        more = f", and {len(damaged) - _SHOWN_DAMAGE} more" if len(damaged) > _SHOWN_DAMAGE else ""
        listed = "; ".join(map(str, damaged[:_SHOWN_DAMAGE])) + more
        raise FormatError(f"{artifact} is damaged: {listed}: compile the model again")
    size = sum(code.bytes for code in tables.code) + tables.header.weights_bytes
    return f"verified: {len(tables.weights)} weights and the code, {format_bytes(size)}, match"


def check_opens(artifact: Path) -> None:
    """Opens what was just made as whoever runs it will: the loader checks all tables, offsets and sizes. Raises
    LlmcError."""
    from llmc.runtime.binding import Artifact

    Artifact(artifact).close()


@contextmanager
def _slow_progress(what: str) -> Iterator[Callable[[int, int], None]]:
    """Yields update(bytes done, total bytes); shows a bar on a terminal's stderr after a while."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    from llmc.cli.render.console import Console

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    bars = Progress(*columns, console=console, transient=True)
    task = bars.add_task(what, total=None)
    begin, shown = time.monotonic(), False

    def update(done: int, total: int) -> None:
        nonlocal shown
        bars.update(task, completed=done, total=total)
        if not shown and console.is_terminal and time.monotonic() - begin > _SHOW_PROGRESS_AFTER_S:
            shown = True
            bars.start()

    try:
        yield update
    finally:
        if shown:
            bars.stop()
