"""A time limit for what may hang on a GPU and runs in this process."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

HUNG = 3
"""Exit code of a process whose part has hung."""


@contextmanager
def time_limit(name: str, limit_s: float, hung: Callable[[], None]) -> Iterator[None]:
    """Ends this process if the body takes longer: a call of the driver that hangs cannot be left.

    hung: called before that, on another thread.
    """

    def end() -> None:
        try:
            print(f"HUNG  {name}: it did not end within {limit_s:g} s", flush=True)
            hung()
        finally:
            os._exit(HUNG)

    timer = threading.Timer(limit_s, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
