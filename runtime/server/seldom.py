"""Warnings that would otherwise be said for each connection."""

from __future__ import annotations

import time

_AGAIN_S = 60.0


class Seldom:
    """Says whether a warning is due: at first, and then once a minute."""

    def __init__(self) -> None:
        self._told_at: float | None = None

    def is_due(self) -> bool:
        """Whether to warn now; counts as done then."""
        now = time.monotonic()
        if self._told_at is not None and now - self._told_at < _AGAIN_S:
            return False
        self._told_at = now
        return True
