"""What becomes of processes."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path


def _stat(pid: int) -> list[str]:
    """Fields of proc(5) from the state on; none where there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def gone(pid: int) -> bool:
    """Whether a process has ended."""
    return _stat(pid)[:1] in ([], ["Z"], ["X"])


def children(pid: int) -> set[int]:
    """Processes that any thread of `pid` has started, zombies too."""
    found: set[int] = set()
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(OSError):  # a thread that has just ended
            found.update(map(int, (task / "children").read_text().split()))
    return found


def descendants(pid: int) -> list[int]:
    """Processes that `pid` has started, those that these have, and so on."""
    parents: dict[int, list[int]] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal() and len(fields := _stat(int(folder.name))) > 1:
            parents.setdefault(int(fields[1]), []).append(int(folder.name))
    found, waiting = [], [pid]
    while waiting:
        children = parents.get(waiting.pop(), [])
        found += children
        waiting += children
    return sorted(found)


def until(done: Callable[[], bool], seconds: float = 60) -> None:
    """For at most far longer than it takes: a machine may be busy."""
    end = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < end, "it did not come to pass"
        time.sleep(0.01)
