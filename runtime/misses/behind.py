"""`python -m llmc.runtime.misses.behind [LIMIT=N…] PROGRAM ARGUMENT…` becomes that program, as low as priorities go.

Limits: `cpus`, that it may run on; `cpu_s`, CPU time of each process; `bytes`, memory of each process. A program of its
own, for in a process with threads little is safe between fork and exec.
"""

from __future__ import annotations

import contextlib
import os
import sys
from typing import NoReturn

LIMITS = ("cpus", "cpu_s", "bytes")


def give_way() -> None:
    """From now on whatever else wants the CPUs comes first."""
    os.setpriority(os.PRIO_PROCESS, 0, 19)
    with contextlib.suppress(AttributeError, OSError):  # Linux alone has the class, and a container may forbid it
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


def limit(name: str, value: int) -> None:
    """From now on for this process and those that it starts. What the system refuses is left as it is."""
    with contextlib.suppress(AttributeError, ImportError, OSError, ValueError):
        if name == "cpus":
            # The last ones: the first has most to do with interrupts and with what is not pinned.
            os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[-value:])
        else:
            import resource  # not on every system

            kind = resource.RLIMIT_CPU if name == "cpu_s" else resource.RLIMIT_DATA
            hard = resource.getrlimit(kind)[1]
            value = value if hard == resource.RLIM_INFINITY else min(value, hard)
            resource.setrlimit(kind, (value, hard))


def become(words: list[str]) -> NoReturn:
    """Limits this process by the first words, and becomes the program of the others."""
    while words and words[0].partition("=")[0] in LIMITS:
        name, _, number = words.pop(0).partition("=")
        limit(name, int(number))
    os.execv(words[0], words)


if __name__ == "__main__":
    give_way()
    become(sys.argv[1:])
