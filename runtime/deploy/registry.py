"""The registry of a deployment's replicas: they report every second, and endpoints query it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

BEAT_S = 1.0
"""Interval of a replica's reports and of an endpoint's queries."""
FORGET_S = 10.0
"""A replica is forgotten after this time without a report."""


@dataclass(frozen=True)
class Place:
    """A replica's address. leaving: it finishes its requests, and gets no new ones."""

    url: str
    leaving: bool = False


class Registry:
    """An actor, one per deployment. It may be lost: replicas report everything again next time."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._places: dict[str, tuple[Place, float]] = {}

    def beat(self, name: str, url: str, leaving: bool = False) -> None:
        """Reports a replica."""
        self._places[name] = (Place(url, leaving), self._clock())

    def leave(self, name: str) -> None:
        """Removes a replica."""
        self._places.pop(name, None)

    def places(self) -> dict[str, Place]:
        """Replicas that reported recently."""
        now = self._clock()
        self._places = {name: one for name, one in self._places.items() if now - one[1] < FORGET_S}
        return {name: place for name, (place, _) in self._places.items()}
