"""What threads read of a checkpoint, whose memory is given back a few MiB at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable

MOST_HELD = 16 << 20
"""Elements: 32 MiB of bf16."""


def _nothing() -> None:
    pass


class Reads:
    """Calls `release` each time that `most` elements were read."""

    def __init__(self, release: Callable[[], None] = _nothing, most: int = MOST_HELD) -> None:
        self._release, self._most = release, most
        self._lock, self._held = threading.Lock(), 0

    def add(self, elements: int) -> None:
        """So many were read, by any thread, and are not needed as they lie in the checkpoint."""
        with self._lock:
            self._held += elements
            if self._held < self._most:
                return
            self._held = 0
        self._release()
