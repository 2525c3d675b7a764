"""Rate at which requests end, and from it the time after which a refused one should come back."""

from __future__ import annotations

import math
from collections import deque

_WINDOW, _WINDOW_S = 256, 60.0
MIN_RETRY_S, MAX_RETRY_S = 1, 60


class Pace:
    """Times, in seconds, at which the last requests ended; lives on one thread."""

    def __init__(self) -> None:
        self._ends: deque[float] = deque(maxlen=_WINDOW)

    def note(self, now: float) -> None:
        """Records that a request ended."""
        self._ends.append(now)

    def seconds_to_halve(self, num_waiting: int, now: float) -> int:
        """Whole seconds until half of the queue is done at the pace of the last minute, which leaves room for others.
        MIN_RETRY_S … MAX_RETRY_S; MIN_RETRY_S while the pace is unknown."""
        recent = [end for end in self._ends if end > now - _WINDOW_S]
        if len(recent) < 2:
            return MIN_RETRY_S
        seconds_each = (now - recent[0]) / (len(recent) - 1)
        return min(MAX_RETRY_S, max(MIN_RETRY_S, math.ceil(num_waiting / 2 * seconds_each)))
