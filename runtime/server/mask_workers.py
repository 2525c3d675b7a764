"""Computes masks of guided requests outside the engine's thread and the event loop."""

from __future__ import annotations

import collections
import heapq
import itertools
import os
import threading
import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from llmc.runtime.binding.engine import Engine
from llmc.runtime.binding.events import Event
from llmc.runtime.binding.handle import LlmcError
from llmc.runtime.guided.setting import set_masks
from llmc.runtime.guided.shared_guides import Guide, SharedGuides
from llmc.runtime.server.niceness import give_way

OnFinished = Callable[[int, int, npt.NDArray[np.uint32]], None]
"""Called with (engine's request id, output index, eos mask) when a guide's text is complete; no mask is set then."""
OnError = Callable[[int, Exception], None]
"""Called with (engine's request id, exception raised by its guide)."""
# As the event loop's own, by default.
_NICE = 10
_KINDS = frozenset({"token", "needs_mask", "finished"})


class _Work:
    """One request: its guides, the events still to handle, and the time its masks took."""

    def __init__(self, engine_id: int, guides: SharedGuides) -> None:
        self.engine_id = engine_id
        self.guides = guides
        self.events: collections.deque[Event] = collections.deque()
        self.spent_ns = 0
        self.queued = False


def default_threads() -> int:
    """More than one, so that a heavy grammar does not block others; few, so that they do not take the engine's
    cores."""
    return max(2, min(8, (os.cpu_count() or 1) // 4))


class GuideWorkers:
    """Answers NEEDS_MASK events. num_threads: 0 for `default_threads`; threads start with the first guided request.

    A request uses at most one thread at a time, which keeps its events in order, and computes one mask per turn. The
    next turn goes to the request that spent the least time so far, so that a heavy grammar does not delay a light one.
    The callbacks run on those threads.
    """

    def __init__(self, engine: Engine, on_finished: OnFinished, on_error: OnError, num_threads: int = 0) -> None:
        self._engine = engine
        self._on_finished = on_finished
        self._on_error = on_error
        self._num_threads = num_threads or default_threads()
        self._threads: list[threading.Thread] = []
        self._changed = threading.Condition()  # guards the fields below
        self._work: dict[int, _Work] = {}  # by the engine's request id
        self._queue: list[tuple[int, int, _Work]] = []  # a heap: spent_ns, order of arrival
        self._order = itertools.count()
        self._clock_ns = 0  # spent_ns of the last turn: idle requests save up no time
        self._stopping = False

    def open(self, engine_id: int, make: Callable[[], Guide], n: int) -> None:
        """Adds a request; its guides are made when its first mask is needed."""
        with self._changed:
            self._work[engine_id] = _Work(engine_id, SharedGuides(make, n))
        while len(self._threads) < self._num_threads:
            thread = threading.Thread(target=self._run, name=f"llmc-guide-{len(self._threads)}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def take(self, event: Event) -> None:
        """Takes an event of a guided request."""
        if event.kind not in _KINDS:
            return
        with self._changed:
            work = self._work.get(event.request_id)
            if work is not None:
                work.events.append(event)
                self._enqueue(work)

    def forget(self, engine_id: int) -> None:
        """Drops the guides of a request that ended."""
        with self._changed:
            work = self._work.pop(engine_id, None)
            if work is not None:
                work.events.clear()

    def close(self) -> None:
        """Ends the threads; no mask is set after this returns."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _enqueue(self, work: _Work) -> None:
        if not work.queued and work.events:
            work.queued = True
            work.spent_ns = max(work.spent_ns, self._clock_ns)
            heapq.heappush(self._queue, (work.spent_ns, next(self._order), work))
            self._changed.notify()

    def _run(self) -> None:
        give_way(least=_NICE)
        while True:
            with self._changed:
                while not self._queue and not self._stopping:
                    self._changed.wait()
                if self._stopping:
                    return
                self._clock_ns, _, work = heapq.heappop(self._queue)
            begin = time.monotonic_ns()
            try:
                self._take_turn(work)
            except Exception as error:  # any exception of a grammar's library must end the request, not the worker
                self.forget(work.engine_id)
                self._on_error(work.engine_id, error)
            with self._changed:
                work.spent_ns += time.monotonic_ns() - begin
                work.queued = False
                self._enqueue(work)
            del work  # guides take memory: keep none while the thread waits

    def _take_turn(self, work: _Work) -> None:
        """Handles events up to and including one mask."""
        while True:
            with self._changed:
                if not work.events:
                    return
                event = work.events.popleft()
            if event.kind == "token":
                work.guides.accept(event.output_index, event.token_id)
            elif event.kind == "finished":
                work.guides.drop(event.output_index)
            else:
                self._set_mask(work, event)
                return

    def _set_mask(self, work: _Work, event: Event) -> None:
        if work.guides.finished(event.output_index):
            self._on_finished(event.request_id, event.output_index, work.guides.mask(event.output_index))
            return
        try:
            set_masks(self._engine, event.request_id, event.output_index, work.guides)
        except LlmcError as error:
            # It ended meanwhile.
            if error.name != "not_found":
                raise
