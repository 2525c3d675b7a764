"""The processes that a process has started."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path


def children(pid: int) -> set[int]:
    """Those of any of its threads, zombies too."""
    found: set[int] = set()
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(OSError):  # a thread that has just ended
            found.update(map(int, (task / "children").read_text().split()))
    return found
