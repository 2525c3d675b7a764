"""The thread that steps an engine: it waits, steps, and tells the event loop when there may be events."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import logging
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from llmc.runtime.binding import Engine, LlmcError
from llmc.runtime.engine_steps import EngineSteps

from .profiler import Profiler
from .requests import ServerStopping

log = logging.getLogger("llmc.server")
_Value = TypeVar("_Value")
_Job = tuple[Callable[[], Any], "asyncio.Future[Any]"]
_IDLE_LOOK_S = 0.1
_CHECK_DEVICE_S = 2.0  # between two looks at a device that idles
_ANSWER_S = 60.0  # within which it has to answer: others may use it, too
_MOST_WORK_S = 0.002  # between two steps, for all of what waits but the last piece


class EngineThread:
    """Steps an engine in a thread of its own.

    most_ahead: the engine waits while the loop is that many steps behind with its events; otherwise they would come
    ever later. on_events: called on the loop when there may be events. on_failure: called when the thread has ended
    with a `failure`. Unless a method says otherwise, call it from the event loop that called `start`.
    """

    def __init__(
        self, engine: Engine, most_ahead: int, on_events: Callable[[], None], on_failure: Callable[[], None]
    ) -> None:
        self.profiler: Profiler | None = None
        self.failure: str | None = None
        self.steps = EngineSteps(engine, _log_failure)
        self.most_ahead = most_ahead
        self.steps_ahead = 0
        self.stopping = threading.Event()
        self._engine = engine
        self._on_events, self._on_failure = on_events, on_failure
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._notified = False
        self._caught_up = threading.Event()
        self._caught_up.set()
        self._jobs: collections.deque[_Job] = collections.deque()
        self._asleep, self._falling_asleep = True, threading.Lock()
        """Whether the thread waits for something to step; the lock is held to compare that with `_jobs`."""
        self._ended = False
        self._device_checked: float | None = None
        """When an idle device last gave a sign of life; None while steps run."""

    @property
    def started(self) -> bool:
        return self._loop is not None

    @property
    def is_behind(self) -> bool:
        """Whether the engine waits for the loop."""
        return not self._caught_up.is_set()

    def start(self) -> None:
        """Starts the thread; call it in the event loop that shall be told of events."""
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, name="llmc-engine", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends after the step in flight. From any thread; may be called twice."""
        self.stopping.set()
        if self._thread is not None:
            self._thread.join()

    def begin_taking(self) -> None:
        """The loop is about to take events: a step that ends meanwhile tells it again."""
        self._notified = False

    def caught_up(self) -> None:
        """The loop has taken all events so far."""
        self.steps_ahead = 0
        self._caught_up.set()

    async def between_steps(self, work: Callable[[], _Value]) -> _Value:
        """Runs `work` on the engine's thread between two steps. Raises what `work` raises, and ServerStopping if the
        thread does not run."""
        return await self._queued(work)

    def unless_asleep(self, work: Callable[[], _Value]) -> asyncio.Future[_Value] | None:
        """As `between_steps`; None if the thread waits for something to step, as it may do for long."""
        with self._falling_asleep:
            return None if self._asleep else self._queued(work)

    def _queued(self, work: Callable[[], _Value]) -> asyncio.Future[_Value]:
        found: asyncio.Future[_Value] = asyncio.get_running_loop().create_future()
        self._jobs.append((work, found))
        if self._ended:
            self._abandon_jobs()
        return found

    def call_between_steps(self, work: Callable[[], _Value]) -> _Value:
        """Like `between_steps`, but blocks; from any thread but the event loop's. Quick work waits here rather than for
        the engine's lock: a thread that loses its CPU while holding the lock would delay the engine's thread."""
        assert self._loop is not None
        return asyncio.run_coroutine_threadsafe(self.between_steps(work), self._loop).result()

    def notify(self) -> None:
        """Makes the loop take events, once for any number of calls."""
        if not self._notified:
            self._notified = True
            self.call(self._on_events)

    def call(self, function: Callable[[], None]) -> None:
        """Runs `function` on the loop; from any thread."""
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens any more
            self._loop.call_soon_threadsafe(function)

    def _run(self) -> None:
        """Main function of the engine's thread."""
        idle = True
        try:
            while not self.stopping.is_set():
                self._work_off()
                if not self._caught_up.wait(_IDLE_LOOK_S):
                    continue
                if idle:
                    ready = self._engine.wait(self._sleep_s())
                    self._asleep = False
                    if ready.events and not ready.work:
                        self.notify()
                        # Requests that are ready stay ready until the loop takes the events, so let it.
                        time.sleep(0.001)
                    if not ready.work:
                        self._check_device()
                        continue
                    self._device_checked = None
                idle = not self.steps.step()
                self.steps_ahead += 1
                if self.steps_ahead >= self.most_ahead:
                    self._caught_up.clear()
                # After that: whoever is told takes the events, and then the engine goes on.
                self.notify()
                if self.profiler is not None and (note := self.profiler.on_step) is not None:
                    note()
        except Exception as error:  # a thread's error must reach those who wait
            self.failure = f"the engine failed: {error}"
            self.call(self._on_failure)
        finally:
            self._ended, self._asleep = True, False
            self.call(self._abandon_jobs)

    def _check_device(self) -> None:
        """Without steps nobody notices that the device is lost. Raises LlmcError if it is."""
        now = time.monotonic()
        if self._device_checked is None:
            self._device_checked = now
        elif now - self._device_checked >= _CHECK_DEVICE_S:
            self._engine.check_device(_ANSWER_S)
            self._device_checked = now

    def _sleep_s(self) -> float:
        """How long to wait for something to step: not at all if there is other work."""
        with self._falling_asleep:
            self._asleep = not self._jobs
        return _IDLE_LOOK_S if self._asleep else 0.0

    def _work_off(self) -> None:
        """Runs what waits for a place between two steps. Work that keeps coming must not hold up the next step."""
        until = time.monotonic() + _MOST_WORK_S
        while self._jobs:
            self._work(*self._jobs.popleft())
            if time.monotonic() >= until:
                return

    def _work(self, work: Callable[[], Any], found: asyncio.Future[Any]) -> None:
        if found.cancelled():  # whoever asked has gone
            return
        try:
            value = work()
        except Exception as error:  # the error belongs to whoever submitted the work
            why = error
            self.call(lambda: None if found.done() else found.set_exception(why))
        else:
            self.call(lambda: None if found.done() else found.set_result(value))

    def _abandon_jobs(self) -> None:
        while self._jobs:
            _, found = self._jobs.popleft()
            if not found.done():
                found.set_exception(ServerStopping(self.failure or "the engine has ended"))


def _log_failure(error: LlmcError) -> None:
    log.error("a step failed, and with it the requests on their way, or all if the host's memory ran out: %s", error)
