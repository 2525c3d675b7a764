"""Counts what threads read of a checkpoint, and returns its memory a few MiB at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable

MOST_HELD = 16 << 20
"""In elements: 32 MiB of bf16."""


def _nothing() -> None:
    pass


class Reads:
    """Calls `release` whenever `most` more elements have been read."""

    def __init__(self, release: Callable[[], None] = _nothing, most: int = MOST_HELD) -> None:
        self._release, self._most = release, most
        self._lock, self._held = threading.Lock(), 0

    def add(self, elements: int) -> None:
        """Reports `elements` read by any thread and no longer needed in the checkpoint's mapping."""
        with self._lock:
            self._held += elements
            if self._held < self._most:
                return
            self._held = 0
        self._release()
