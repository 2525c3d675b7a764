"""Threads for what requests cost before and after the engine: short work is done at once, long work aside."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

_Value = TypeVar("_Value")
# Up to this many characters or tokens work is done on the event loop: handing over costs more.
SMALL = 4096
# Beyond this many it takes a tenth of a second and more.
_LARGE = 1 << 18
# The engine's threads, and other requests, come first.
_NICE = 5


class Lanes:
    """bodies: parses large bodies, one at a time, for that holds Python's lock."""

    def __init__(self) -> None:
        self.bodies = _lane("bodies", 1)
        self._middling = _lane("texts", 2)
        self._large = _lane("large-texts", 1)
        # A grammar may take seconds to compile: nobody's prompt waits for that.
        self._grammars = _lane("compile", 1)

    async def run(self, work: Callable[[], _Value], size: int) -> _Value:
        """Runs `work` over `size` characters or tokens: at once when it is short, else aside, large work by itself."""
        if size <= SMALL:
            return work()
        return await _in(self._middling if size <= _LARGE else self._large, work)

    async def compile(self, work: Callable[[], _Value]) -> _Value:
        """Runs `work` on a constraint, aside."""
        return await _in(self._grammars, work)

    def close(self) -> None:
        """Drops what waits, and waits for nothing."""
        for lane in (self.bodies, self._middling, self._large, self._grammars):
            lane.shutdown(wait=False, cancel_futures=True)


async def _in(lane: ThreadPoolExecutor, work: Callable[[], _Value]) -> _Value:
    return await asyncio.get_running_loop().run_in_executor(lane, work)


def _lane(name: str, num_threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(num_threads, thread_name_prefix=f"llmc-{name}", initializer=_give_way)


def _give_way() -> None:
    if hasattr(os, "setpriority"):  # not on Windows
        with contextlib.suppress(OSError):
            thread = threading.get_native_id()
            os.setpriority(os.PRIO_PROCESS, thread, min(19, os.getpriority(os.PRIO_PROCESS, thread) + _NICE))
