"""Progress bars of a compilation, one per phase."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llmc.compiler.config import Progress


@contextmanager
def progress_bar() -> Iterator[Progress]:
    """A progress callback for the compiler: one bar per phase on stderr, nothing if stderr is no terminal."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from llmc.cli.render.console import Console

    console = Console(stderr=True)
    # A phase without countable steps shows a pulsing bar without numbers.
    columns = (TextColumn("{task.description:<12}"), BarColumn(), TextColumn("{task.fields[steps]:>9}"),
               TimeElapsedColumn())  # fmt: skip
    with Progress(*columns, console=console, disable=not console.is_terminal) as bars:
        tasks: dict[str, Any] = {}

        def update(phase: str, done: int, total: int) -> None:
            steps = f"{done}/{total}" if total > 1 else ""
            if phase not in tasks:
                tasks[phase] = bars.add_task(phase, total=total or None, steps=steps)
            bars.update(tasks[phase], completed=done, total=total or None, steps=steps)

        yield update
