"""Watches an engine's bucket-miss counters, and reports new misses; see llmc_bucket_miss."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from llmc.runtime.binding.statistics import BucketMiss, EngineStats

log = logging.getLogger("llmc.misses")
LOOK_S = 1.0
OnMisses = Callable[[Sequence[BucketMiss]], None]
"""Called with the misses since the previous call; `count` is also since then."""


class MissCounter(Protocol):
    """The watched part of an engine; thread-safe."""

    @property
    def stats(self) -> EngineStats: ...
    def bucket_misses(self) -> list[BucketMiss]: ...


class MissWatch:
    """Polls on its own thread. Close it before the engine; that reports remaining misses."""

    def __init__(self, engine: MissCounter, on_misses: Sequence[OnMisses], look_s: float = LOOK_S) -> None:
        self._engine = engine
        self._on_misses = on_misses
        self._look_s = look_s
        self._told: dict[BucketMiss, int] = {}
        self._total = 0
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="llmc-misses", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Tells what is left; may be called twice."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._thread.join()
        self._look()

    def _run(self) -> None:
        while not self._closing.wait(self._look_s):
            self._look()

    def _look(self) -> None:
        # Check the total first: most engines never miss.
        if self._engine.stats.num_bucket_misses == self._total:
            return
        new = []
        for miss in self._engine.bucket_misses():
            shape = replace(miss, count=0)
            if (count := miss.count - self._told.get(shape, 0)) > 0:
                self._told[shape] = miss.count
                self._total += count
                new.append(replace(miss, count=count))
        for callback in self._on_misses if new else ():
            try:
                callback(new)
            except Exception:  # an observer's failure must not stop the watch
                log.exception("an observer of bucket misses failed")
