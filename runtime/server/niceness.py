"""Threads that give way to the engine's."""

from __future__ import annotations

import contextlib
import os
import threading


def give_way(more: int = 0, *, least: int = 0, batch: bool = False) -> None:
    """Makes the calling thread nicer, where the system can: by `more`, and to `least` at least.

    batch: nobody waits for its milliseconds, so it need not be woken at once.
    """
    if not hasattr(os, "setpriority"):  # Windows
        return
    # On Linux a thread has a niceness of its own; elsewhere this refuses, and the thread runs as it is.
    with contextlib.suppress(OSError):
        thread = threading.get_native_id()
        nice = max(least, os.getpriority(os.PRIO_PROCESS, thread) + more)
        os.setpriority(os.PRIO_PROCESS, thread, min(19, nice))
    if batch and hasattr(os, "SCHED_BATCH"):
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
