"""`python -m llmc.runtime.misses.behind [LIMIT=N…] PROGRAM ARGUMENT…` becomes that program, at lowest priority.

Limits: `cpus`, number of CPUs; `cpu_s`, CPU time of each process; `bytes`, memory of each process. A separate program,
because little is safe between fork and exec in a process with threads.
"""

from __future__ import annotations

import contextlib
import os
import sys
from typing import NoReturn

LIMITS = ("cpus", "cpu_s", "bytes")


def give_way() -> None:
    """Lowers this process to the lowest priority."""
    os.setpriority(os.PRIO_PROCESS, 0, 19)
    with contextlib.suppress(AttributeError, OSError):  # Linux alone has the class, and a container may forbid it
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


def limit(name: str, value: int) -> None:
    """Limits this process and its children. What the system refuses is left unchanged."""
    with contextlib.suppress(AttributeError, ImportError, OSError, ValueError):
        if name == "cpus":
            # The last CPUs: the first has most interrupts and unpinned work.
            os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[-value:])
        else:
            import resource  # not on every system

            kind = resource.RLIMIT_CPU if name == "cpu_s" else resource.RLIMIT_DATA
            hard = resource.getrlimit(kind)[1]
            value = value if hard == resource.RLIM_INFINITY else min(value, hard)
            resource.setrlimit(kind, (value, hard))


def become(words: list[str]) -> NoReturn:
    """Limits this process by the leading words, and becomes the program in the rest."""
    while words and words[0].partition("=")[0] in LIMITS:
        name, _, number = words.pop(0).partition("=")
        limit(name, int(number))
    os.execv(words[0], words)


if __name__ == "__main__":
    give_way()
    become(sys.argv[1:])
