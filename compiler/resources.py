"""Resources used by a compilation: memory of its process tree, and time since the process began."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from types import TracebackType

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def _children(pid: int) -> list[int]:
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        found += map(int, (task / "children").read_text().split())
    return found


def tree_bytes(pid: int) -> int:
    """Resident bytes of a process and its descendants, mapped files included; a page they share counts in each.

    0 for a process that is gone and on a system without /proc.
    """
    try:
        total = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE_BYTES
        return total + sum(map(tree_bytes, _children(pid)))
    except (OSError, ValueError, IndexError):
        return 0


def seconds_since_start() -> float:
    """Age of this process, accurate to about 10 ms; includes imports before the first clock reading."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / _TICKS_PER_S)
    except (OSError, ValueError, IndexError, AttributeError):
        return time.process_time()


class PeakMemory:
    """Samples the process tree's resident memory while its block runs; peak_bytes is the largest sample."""

    def __init__(self, interval_s: float = 0.02) -> None:
        self.peak_bytes = 0
        self._interval_s = interval_s
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, name="llmc-peak-memory", daemon=True)

    def sample(self) -> int:
        """Takes a sample now and returns the peak so far."""
        self.peak_bytes = max(self.peak_bytes, tree_bytes(os.getpid()))
        return self.peak_bytes

    def _run(self) -> None:
        while not self._done.wait(self._interval_s):
            self.sample()

    def __enter__(self) -> PeakMemory:
        self.sample()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._done.set()
        self._thread.join()
        self.sample()
