"""Masks for guided requests, computed beside the engine's thread and the event loop."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt

from llmc.runtime.engine import Engine, Event
from llmc.runtime.handle import LlmcError

from .requests import Guide

OnFinished = Callable[[int, int, npt.NDArray[np.uint32]], None]
"""Called with (engine's request id, output index, mask of eos) when a guide's text is complete: no mask is set then."""
OnError = Callable[[int, Exception], None]
"""Called with (engine's request id, what its guide raised)."""


class GuideWorker:
    """Answers NEEDS_MASK events. One thread: the order of a continuation's events is kept, and the engine's cores are
    left alone. The callbacks are called on that thread."""

    def __init__(self, engine: Engine, on_finished: OnFinished, on_error: OnError) -> None:
        self._engine = engine
        self._on_finished = on_finished
        self._on_error = on_error
        self._guides: dict[int, list[Guide]] = {}  # by the engine's request id; touched by the worker only
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="llmc-guide")

    def open(self, engine_id: int, make: Callable[[], Guide], n: int) -> None:
        """Makes the guides of a request."""
        self._pool.submit(self._guarded, engine_id, lambda: self._open(engine_id, make, n))

    def take(self, event: Event) -> None:
        """Takes an event of a guided request."""
        if event.kind in ("token", "needs_mask"):
            self._pool.submit(self._guarded, event.request_id, lambda: self._take(event))

    def forget(self, engine_id: int) -> None:
        """Drops the guides of a request that ended."""
        self._pool.submit(self._guides.pop, engine_id, None)

    def close(self) -> None:
        """Ends the thread; no mask is set after this returns."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _open(self, engine_id: int, make: Callable[[], Guide], n: int) -> None:
        self._guides[engine_id] = [make() for _ in range(n)]

    def _take(self, event: Event) -> None:
        guides = self._guides.get(event.request_id)
        if guides is None:
            return
        guide = guides[event.output_index]
        if event.kind == "token":
            guide.accept(event.token_id)
            return
        if guide.finished:
            self._on_finished(event.request_id, event.output_index, guide.mask())
            return
        try:
            self._engine.set_token_mask(event.request_id, event.output_index, guide.mask())
        except LlmcError as error:
            # It ended meanwhile.
            if error.name != "not_found":
                raise

    def _guarded(self, engine_id: int, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:  # whatever a grammar's library raises must end the request, not the worker
            self._guides.pop(engine_id, None)
            self._on_error(engine_id, error)
