"""`python -m llmc.runtime.misses.behind PROGRAM ARGUMENT…` becomes that program, as low as priorities go.

A program of its own, for in a process with threads little is safe between fork and exec.
"""

from __future__ import annotations

import contextlib
import os
import sys


def give_way() -> None:
    """From now on whatever else wants the CPUs comes first."""
    os.setpriority(os.PRIO_PROCESS, 0, 19)
    with contextlib.suppress(AttributeError, OSError):  # Linux alone has the class, and a container may forbid it
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


if __name__ == "__main__":
    give_way()
    os.execv(sys.argv[1], sys.argv[1:])
