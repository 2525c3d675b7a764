"""Where the replicas of a deployment are: they say so every second, and endpoints ask."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

BEAT_S = 1.0
"""Between two words of a replica, and between two questions of an endpoint."""
FORGET_S = 10.0
"""Without a word a replica is forgotten."""


@dataclass(frozen=True)
class Place:
    """A replica's address. leaving: it ends what it has, and gets nothing new."""

    url: str
    leaving: bool = False


class Registry:
    """One for each deployment, an actor. It may be lost: replicas say everything again with their next word."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._places: dict[str, tuple[Place, float]] = {}

    def beat(self, name: str, url: str, leaving: bool = False) -> None:
        """A replica is there."""
        self._places[name] = (Place(url, leaving), self._clock())

    def leave(self, name: str) -> None:
        """It is not any more."""
        self._places.pop(name, None)

    def places(self) -> dict[str, Place]:
        """Those that have said so lately."""
        now = self._clock()
        self._places = {name: one for name, one in self._places.items() if now - one[1] < FORGET_S}
        return {name: place for name, (place, _) in self._places.items()}
