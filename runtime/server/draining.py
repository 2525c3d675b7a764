"""uvicorn with a drain: what a first, a second and a third signal do to a process that serves."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from types import FrameType

import uvicorn

# Time for sending the last answers: after a drain, and after a second signal.
_SEND_S, _SEND_AT_ONCE_S = 10.0, 1.0
_LOOK_S = 0.02

OnStopping = Callable[[str], None]
"""Called with one line that says why the process ends and what still runs."""


class DrainingServer(uvicorn.Server, ABC):
    """uvicorn with a drain: new requests meanwhile get a 503, and a signal ends the process with exit code 0.

    drain_timeout_s: time for running requests; None for no limit.
    """

    def __init__(self, config: uvicorn.Config, drain_timeout_s: float | None, tell: OnStopping) -> None:
        super().__init__(config)
        self._drain_timeout_s = drain_timeout_s
        self._tell = tell
        self._why = "the server was told to stop"
        self._serving_loop: asyncio.AbstractEventLoop | None = None
        self._drained: asyncio.Task[int] | None = None
        self._began = 0.0

    @property
    @abstractmethod
    def num_running(self) -> int:
        """Requests that run or wait."""

    @abstractmethod
    def begin_drain(self) -> asyncio.Task[int]:
        """Refuses new requests; running ones get drain_timeout_s. The task returns how many were cancelled."""

    @abstractmethod
    def abandon(self) -> int:
        """Ends all requests at once; returns their number."""

    def stop(self, why: str) -> None:
        """Ends the server once its running requests have finished."""
        self._why, self.should_exit = why.removesuffix("."), True

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal drains, the second ends at once, the third kills the process as if unhandled."""
        if self.should_exit:
            self.force_exit = True
            signal.signal(sig, signal.SIG_DFL)
            return
        self.stop("Ctrl+C (SIGINT)" if sig == signal.SIGINT else signal.Signals(sig).name)
        if self._serving_loop is not None:
            self._serving_loop.call_soon_threadsafe(self._begin)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's."""
        await super().startup(sockets)
        self._serving_loop = asyncio.get_running_loop()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Drains with the listener open, so that new clients get a 503; then closes connections and application."""
        await self._drain()
        for listener in (*self.servers, *(sockets or ())):
            listener.close()
        connections, tasks = self.server_state.connections, self.server_state.tasks
        for connection in list(connections):
            connection.shutdown()
        await self._until(lambda: not connections and not tasks, _SEND_S)
        # Without a connection, a handler that is cut off sends no 500 and logs no error.
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL + 1)
        for connection in list(connections):
            connection.transport.abort()
        await self._until(lambda: not tasks, _SEND_AT_ONCE_S)
        await self.lifespan.shutdown()

    def _begin(self) -> asyncio.Task[int]:
        """Begins the drain and reports it, once. The task returns the number of cancelled requests."""
        if self._drained is None:
            running, limit = self.num_running, self._drain_timeout_s
            time_left = "as long as they take" if limit is None else f"up to {limit:g} s"
            what = f"{_requests(running)} running, {time_left} to finish" if running else "no request runs"
            self._drained, self._began = self.begin_drain(), time.monotonic()
            self._tell(f"stopping: {self._why}; {what}")
        return self._drained

    async def _drain(self) -> None:
        drained = self._begin()
        while not drained.done() and not self.force_exit:
            await asyncio.wait({drained}, timeout=0.1)
            await self.on_tick(0)  # renews the Date of answers
        if not drained.done():
            cancelled = self.abandon()
            self._tell(f"stopping at once: a second signal; {_requests(cancelled)} cancelled")
        elif cancelled := drained.result():
            self._tell(f"{_requests(cancelled)} cancelled after {time.monotonic() - self._began:.1f} s")

    async def _until(self, done: Callable[[], bool], most_s: float) -> None:
        """Waits for a condition, at most `most_s`, and less once a second signal has come."""
        began = time.monotonic()
        while not done() and time.monotonic() - began < (_SEND_AT_ONCE_S if self.force_exit else most_s):
            await asyncio.sleep(_LOOK_S)


def _requests(count: int) -> str:
    return "1 request" if count == 1 else f"{count} requests"
