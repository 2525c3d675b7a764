"""Threads that yield to the engine's threads."""

from __future__ import annotations

import contextlib
import os
import threading


def give_way(more: int = 0, *, least: int = 0, batch: bool = False) -> None:
    """Raises the niceness of the calling thread, where the system can: by `more`, and to at least `least`.

    batch: nobody waits for the thread's milliseconds, so the system need not wake it at once.
    """
    if not hasattr(os, "setpriority"):  # Windows
        return
    # On Linux each thread has its own niceness. Elsewhere the call is refused, and the thread keeps its priority.
    with contextlib.suppress(OSError):
        thread = threading.get_native_id()
        nice = max(least, os.getpriority(os.PRIO_PROCESS, thread) + more)
        os.setpriority(os.PRIO_PROCESS, thread, min(19, nice))
    if batch and hasattr(os, "SCHED_BATCH"):
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
