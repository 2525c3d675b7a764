"""Threads for what requests cost before and after the engine: short work is done at once, long work aside."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from .niceness import give_way

_Value = TypeVar("_Value")
# Up to this many characters or tokens work is done on the event loop: handing over costs more.
SMALL = 4096
# Beyond this many it takes a tenth of a second and more.
_LARGE = 1 << 18
# Constraints of more characters may take more than some milliseconds to compile.
_LARGE_GRAMMAR = 8192
# The engine's threads, and other requests, come first.
_NICE = 5


class Lanes:
    """bodies: parses large bodies, one at a time, for that holds Python's lock."""

    def __init__(self) -> None:
        self.bodies = _lane("bodies", 1)
        self._middling = _lane("texts", 2)
        self._large = _lane("large-texts", 1)
        # A large grammar may take a second to compile: nobody's prompt waits for that, and no small grammar.
        self._grammars = _lane("compile", 1, batch=True)
        self._large_grammars = _lane("compile-large", 1, batch=True)

    async def run(self, work: Callable[[], _Value], size: int) -> _Value:
        """Runs `work` over `size` characters or tokens: at once when it is short, else aside, large work by itself."""
        if size <= SMALL:
            return work()
        return await _in(self._middling if size <= _LARGE else self._large, work)

    async def compile(self, work: Callable[[], _Value], size: int = 0) -> _Value:
        """Runs `work` on a constraint of `size` characters, aside, large ones by themselves."""
        return await _in(self._grammars if size <= _LARGE_GRAMMAR else self._large_grammars, work)

    def close(self) -> None:
        """Drops what waits, and waits for nothing."""
        for lane in (self.bodies, self._middling, self._large, self._grammars, self._large_grammars):
            lane.shutdown(wait=False, cancel_futures=True)


async def _in(lane: ThreadPoolExecutor, work: Callable[[], _Value]) -> _Value:
    return await asyncio.get_running_loop().run_in_executor(lane, work)


def _lane(name: str, num_threads: int, *, batch: bool = False) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(
        num_threads, thread_name_prefix=f"llmc-{name}", initializer=lambda: give_way(_NICE, batch=batch)
    )
