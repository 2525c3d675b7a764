"""Prompts of batches not yet submitted: each client's batch enters the engine a window at a time.

So a new request waits behind a window of each batch, not behind all their prompts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from llmc.runtime.binding.handle import LlmcError
from llmc.runtime.outputs import RequestFailure
from llmc.runtime.server.request_stream import RequestStream

from .requests import QueueFull


class _Batch:
    """The waiting prompts of one client, and the number of its sequences in the engine."""

    def __init__(self, streams: Sequence[RequestStream]) -> None:
        self.waiting = deque(streams)
        self.num_live = 0


class Backlog:
    """Lives on the event loop.

    window: most sequences of a batch in the engine. submit: submits a request and returns its id; raises QueueFull, or
    LlmcError if the engine refuses it.
    """

    def __init__(self, window: int, submit: Callable[[RequestStream], int]) -> None:
        self._window = window
        self._submit = submit
        self._batches: dict[int, _Batch] = {}  # running ones, by the engine's ids
        self._open: dict[int, _Batch] = {}  # those with waiting prompts, by id(), oldest first
        self._turns: deque[_Batch] = deque()  # those with room in their window that found the queue full

    def open(self, streams: Sequence[RequestStream]) -> None:
        """Submits the first window, and the rest as it drains. Raises what `submit` raises, and then keeps nothing."""
        batch = _Batch(streams)
        try:
            self._fill(batch)
        except BaseException:
            batch.waiting.clear()
            raise
        self._keep(batch)

    def sequence_ended(self, engine_id: int, *, last: bool) -> None:
        """Records the end of a sequence; with the last one, its request has ended."""
        batch = self._batches.pop(engine_id, None) if last else self._batches.get(engine_id)
        if batch is not None:
            batch.num_live -= 1
            if batch.waiting and batch not in self._turns:
                self._turns.append(batch)
        while self._turns:
            try:
                self._fill_later(self._turns[0])
            except QueueFull:
                return
            self._keep(self._turns.popleft())

    def waiting(self) -> list[RequestStream]:
        """Prompts not yet in the engine, oldest first."""
        return [stream for batch in self._open.values() for stream in batch.waiting if not stream.done]

    @property
    def num_waiting(self) -> int:
        """The number of waiting prompts; thread-safe."""
        return sum(len(batch.waiting) for batch in list(self._open.values()))

    def clear(self) -> list[RequestStream]:
        """Drops everything, and returns what waited."""
        waiting = self.waiting()
        for batch in self._open.values():
            batch.waiting.clear()
        self._open.clear()
        self._turns.clear()
        self._batches.clear()
        return waiting

    def _keep(self, batch: _Batch) -> None:
        if batch.waiting:
            self._open[id(batch)] = batch
        else:
            self._open.pop(id(batch), None)

    def _fill(self, batch: _Batch) -> None:
        while batch.waiting and batch.num_live < self._window:
            stream = batch.waiting[0]
            if not stream.done:
                engine_id = self._submit(stream)
                self._batches[engine_id] = batch
                batch.num_live += stream.request.params.n
            batch.waiting.popleft()

    def _fill_later(self, batch: _Batch) -> None:
        """A later refusal fails only that request: others of its batch are running."""
        while True:
            try:
                self._fill(batch)
                return
            except LlmcError as error:
                batch.waiting.popleft().fail(RequestFailure(error.name, str(error)))
