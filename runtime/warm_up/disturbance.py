"""How much other work disturbed a measurement: how long engine threads waited for a CPU, and CPU time of other
processes.

Linux reports both. On a system that does not, every measurement counts as undisturbed, and only its spread warns.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

BUSY = 0.1
"""A machine counts as busy from this share on, and measurements made on it as disturbed."""
_TEAM_THREAD = re.compile(r"llmc-\d+", re.ASCII)
_TASKS = Path("/proc/self/task")
_STAT = Path("/proc/stat")
# user, nice, system, irq, softirq, steal: all but idle time and what counts twice.
_BUSY_COLUMNS = (1, 2, 3, 6, 7, 8)


@dataclass(frozen=True, slots=True)
class Mark:
    """Counters at one moment. wait_ns: run-queue wait of each engine thread so far. busy_s: CPU time of the whole
    machine; own_s: of this process; None where the system does not report it."""

    time_s: float
    wait_ns: Mapping[int, int]
    busy_s: float | None = None
    own_s: float = 0.0


class Watch(Protocol):
    """Tells how much a stretch of time was disturbed."""

    def mark(self) -> Mark: ...
    def waited_s(self, since: Mark) -> float: ...
    def taken(self, since: Mark) -> float: ...


class MachineWatch:
    """Reads the counters of this machine.

    waited_s: longest wait of a single engine thread for a CPU, in seconds. taken: share of the machine's CPU time used
    by other processes, 0 … 1. Marks and questions come from the thread that replays.
    """

    def __init__(self, tasks: Path = _TASKS, stat: Path = _STAT, cpus: int | None = None, tick_s: float = 0.0) -> None:
        self._tasks, self._stat = tasks, stat
        self._cpus = cpus or os.cpu_count() or 1
        self._tick_s = tick_s or 1 / _ticks_per_s()
        self._team: list[Path] = []

    def mark(self) -> Mark:
        return Mark(time.monotonic(), self._waits(), self._busy_s(), time.process_time())

    def waited_s(self, since: Mark) -> float:
        now = self._waits()
        return max((now[thread] - before for thread, before in since.wait_ns.items() if thread in now), default=0) / 1e9

    def taken(self, since: Mark) -> float:
        busy_s = self._busy_s()
        wall_s = time.monotonic() - since.time_s
        if busy_s is None or since.busy_s is None or wall_s <= 0:
            return 0.0
        own_s = time.process_time() - since.own_s
        # The machine's clock counts whole ticks: each CPU may be one off.
        others_s = busy_s - since.busy_s - own_s - self._cpus * self._tick_s
        return min(1.0, max(0.0, others_s / (self._cpus * wall_s)))

    def _waits(self) -> dict[int, int]:
        """Run-queue wait in nanoseconds so far: of the engine's threads and of the calling thread, which works with
        them."""
        self._team = self._team or _engine_threads(self._tasks)
        waits = {}
        for task in (*self._team, self._tasks / str(threading.get_native_id())):
            try:
                waits[int(task.name)] = int((task / "schedstat").read_bytes().split()[1])
            except (OSError, ValueError, IndexError):
                continue  # it ended, or the system keeps no such count
        return waits

    def _busy_s(self) -> float | None:
        try:
            with self._stat.open("rb") as file:
                columns = file.readline().split()
            return sum(int(columns[i]) for i in _BUSY_COLUMNS) * self._tick_s
        except (OSError, ValueError, IndexError):
            return None


def _engine_threads(tasks: Path) -> list[Path]:
    """The threads that replay graphs beside their caller: the native library names them llmc-1, llmc-2, …"""
    found = []
    try:
        for task in sorted(tasks.iterdir()):
            if _TEAM_THREAD.fullmatch((task / "comm").read_text(encoding="utf-8", errors="replace").strip()):
                found.append(task)
    except OSError:
        return []
    return found


def _ticks_per_s() -> int:
    try:
        return os.sysconf("SC_CLK_TCK")
    except (AttributeError, OSError, ValueError):
        return 100
