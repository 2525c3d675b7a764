"""Threads for the work of requests before and after the engine: short work runs at once, long work in threads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from .niceness import give_way

_Value = TypeVar("_Value")
# Up to that many characters or tokens, work runs on the event loop: handing it over costs more.
SMALL = 4096
# Beyond that many it takes a tenth of a second or more.
_LARGE = 1 << 18
# Longer constraints, in characters, may take more than a few milliseconds to compile.
_LARGE_GRAMMAR = 8192
NICE = 5
"""Of threads that work for requests: those of the engine come first."""


class Lanes:
    """bodies: parses large bodies, one at a time, because parsing holds Python's lock."""

    def __init__(self) -> None:
        self.bodies = _lane("bodies", 1)
        self._middling = _lane("texts", 2)
        self._large = _lane("large-texts", 1)
        # A large grammar may take a second to compile; no prompt and no small grammar should wait for it.
        self._grammars = _lane("compile", 1, batch=True)
        self._large_grammars = _lane("compile-large", 1, batch=True)

    async def run(self, work: Callable[[], _Value], size: int) -> _Value:
        """Runs `work` over `size` characters or tokens: short work at once, longer work in a thread, large work in one
        of its own."""
        if size <= SMALL:
            return work()
        return await _in(self._middling if size <= _LARGE else self._large, work)

    async def compile(self, work: Callable[[], _Value], size: int = 0) -> _Value:
        """Compiles a constraint of `size` characters in a thread; large ones in one of their own."""
        return await _in(self._grammars if size <= _LARGE_GRAMMAR else self._large_grammars, work)

    def close(self) -> None:
        """Drops pending work; does not wait for running work."""
        for lane in (self.bodies, self._middling, self._large, self._grammars, self._large_grammars):
            lane.shutdown(wait=False, cancel_futures=True)


async def _in(lane: ThreadPoolExecutor, work: Callable[[], _Value]) -> _Value:
    return await asyncio.get_running_loop().run_in_executor(lane, work)


def _lane(name: str, num_threads: int, *, batch: bool = False) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(
        num_threads, thread_name_prefix=f"llmc-{name}", initializer=lambda: give_way(NICE, batch=batch)
    )
