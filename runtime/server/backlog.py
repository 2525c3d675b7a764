"""What batches have not submitted yet: a client's prompts go to the engine a window at a time.

So a request that comes meanwhile waits behind a window of each batch, not behind all prompts of all batches.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from llmc.runtime.binding.handle import LlmcError
from llmc.runtime.outputs import RequestFailure
from llmc.runtime.server.request_stream import RequestStream

from .requests import QueueFull


class _Batch:
    """The prompts of one client that wait, and how many sequences of it the engine has."""

    def __init__(self, streams: Sequence[RequestStream]) -> None:
        self.waiting = deque(streams)
        self.num_live = 0


class Backlog:
    """Lives on the event loop.

    window: sequences that the engine has of a batch before the next prompt waits. submit: gives the engine a request
    and returns its id; raises QueueFull, and LlmcError for what the engine refuses.
    """

    def __init__(self, window: int, submit: Callable[[RequestStream], int]) -> None:
        self._window = window
        self._submit = submit
        self._batches: dict[int, _Batch] = {}  # by the engine's ids of what runs
        self._open: dict[int, _Batch] = {}  # those with prompts that wait, by id(); in order of coming
        self._turns: deque[_Batch] = deque()  # those that have room in their window and found none in the queue

    def open(self, streams: Sequence[RequestStream]) -> None:
        """Submits the first window, and the rest as that ends. Raises what `submit` raises; nothing is kept then."""
        batch = _Batch(streams)
        try:
            self._fill(batch)
        except BaseException:
            batch.waiting.clear()
            raise
        self._keep(batch)

    def sequence_ended(self, engine_id: int, *, last: bool) -> None:
        """A sequence of a request ended, and with the last one the request."""
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
        """What the engine does not have yet, oldest first."""
        return [stream for batch in self._open.values() for stream in batch.waiting if not stream.done]

    @property
    def num_waiting(self) -> int:
        """How many those are, for any thread."""
        return sum(len(batch.waiting) for batch in list(self._open.values()))

    def clear(self) -> list[RequestStream]:
        """Forgets all, and returns what waited."""
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
        """What the engine refuses now fails alone: the others of its batch run already."""
        while True:
            try:
                self._fill(batch)
                return
            except LlmcError as error:
                batch.waiting.popleft().fail(RequestFailure(error.name, str(error)))
