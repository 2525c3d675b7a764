"""One running request on an event loop: takes events of the engine, gives deltas of text."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence

import numpy as np
import numpy.typing as npt

from llmc.runtime.binding.events import Event
from llmc.runtime.context_limit import ContextLimit
from llmc.runtime.generation import Generation, decoder
from llmc.runtime.outputs import RequestFailure, TokenDelta
from llmc.runtime.server.requests import EngineRequest, RequestRecord
from llmc.runtime.text.tokenizer import Tokenizer


class RequestStream:
    """An asynchronous iterator of TokenDelta; lives on the event loop's thread.

    Deltas that its consumer has not taken yet are merged, so a slow reader holds the text of its answer and no more.
    Closing it calls `cancel`, which the submitter sets. If the engine failed the request, the last deltas have an
    `error`.
    """

    def __init__(self, request: EngineRequest, tokenizer: Tokenizer | None, limit: ContextLimit | None = None) -> None:
        self.request = request
        self.engine_id = 0
        self.cancel: Callable[[], None] | None = None
        self.on_news: Callable[[], None] | None = None
        self._tokenizer = tokenizer
        self._limit = limit
        self._generation: Generation | None = None
        self._closed = False
        self._wakeup: asyncio.Future[None] | None = None
        self._record: RequestRecord | None = None
        self.started_ns = time.monotonic_ns()
        self.vector: npt.NDArray[np.float32] | None = None
        """What the request gives, filled when it has stopped."""
        if request.vector_width:
            self.vector = np.zeros(request.vector_width, np.float32)

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> TokenDelta:
        while True:
            delta = self.take_delta()
            if delta is not None:
                return delta
            if self.over:
                raise StopAsyncIteration
            self._wakeup = asyncio.get_running_loop().create_future()
            try:
                await self._wakeup
            finally:
                self._wakeup = None

    def take_delta(self) -> TokenDelta | None:
        """The next delta, or None if there is none; `on_news` is called when one arrives."""
        return None if self._generation is None else self._generation.next_delta()

    @property
    def over(self) -> bool:
        """Whether `take_delta` will give no more deltas than those it holds."""
        return self._closed or self.done

    def close(self) -> None:
        """Ends the iteration; a request that still runs is cancelled before the engine's next step."""
        if not self._closed:
            if self.cancel is not None and not self.engine_done:
                self.cancel()
            self._closed = True
            self._wake()

    def release(self) -> None:
        """Drops the recorded output; call it once all deltas are taken."""
        if self._record is not None:
            self._generation = None

    @property
    def generation(self) -> Generation:
        """What the engine produced. Made with its first event, because many prompts may still wait for theirs."""
        if self._generation is None:
            request = self.request
            decode = decoder(self._tokenizer, request.params)
            prompt = request.prompt_token_ids
            self._generation = Generation(
                prompt, request.params, decode, self._limit, request.index, told=request.told, resumes=request.resumes
            )
        return self._generation

    @property
    def done(self) -> bool:
        """Whether all continuations have ended, even if their last deltas were not taken yet."""
        return self._record is not None or (self._generation is not None and self._generation.done)

    @property
    def engine_done(self) -> bool:
        """Whether the engine will report nothing more about this request."""
        return self._record is not None or (self._generation is not None and self._generation.engine_done)

    @property
    def num_output_tokens(self) -> int:
        """Tokens of all continuations so far."""
        return 0 if self._generation is None else self._generation.num_output_tokens

    @property
    def first_token_ns(self) -> int:
        """Time of the first token on time.monotonic_ns(); 0: none yet."""
        return 0 if self._generation is None else self._generation.first_token_ns

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens that came from the prefix cache, known with the first token."""
        return 0 if self._generation is None else self._generation.num_cached_tokens

    @property
    def record(self) -> RequestRecord | None:
        """Set once `engine_done`."""
        return self._record

    def take(self, event: Event) -> None:
        """Takes an event of the engine about this request."""
        generation = self.generation
        generation.take(event)
        if generation.engine_done:
            self._keep_record(event)
        self._wake()

    def end_unsubmitted(self) -> None:
        """Ends a request that the engine never got and whose answer nobody wants any more."""
        self._record = RequestRecord(
            request_id=self.request.request_id,
            arrival_ns=self.started_ns,
            first_scheduled_ns=0,
            first_token_ns=0,
            finished_ns=time.monotonic_ns(),
            num_prompt_tokens=len(self.request.prompt_token_ids),
            num_cached_tokens=0,
            num_output_tokens=0,
            finish_reasons=("cancelled",) * self.request.params.n,
        )

    def finish_output(self, output_index: int) -> None:
        """Ends a continuation whose text is complete, for example because its grammar allows nothing more."""
        self.generation.finish_output(output_index)
        self._wake()

    def fail(self, failure: RequestFailure) -> None:
        """Ends all running continuations. The consumer gets the error after the deltas so far."""
        self.generation.fail(failure)
        self._wake()

    def _keep_record(self, event: Event) -> None:
        generation = self.generation
        self._record = RequestRecord(
            request_id=self.request.request_id,
            # The engine's own time is later if the request waited for others of its batch.
            arrival_ns=min(event.arrival_ns, self.started_ns),
            first_scheduled_ns=event.first_scheduled_ns,
            first_token_ns=event.first_token_ns,
            finished_ns=event.time_ns,
            num_prompt_tokens=generation.num_prompt_tokens,
            num_cached_tokens=generation.num_cached_tokens,
            num_output_tokens=generation.num_output_tokens,
            finish_reasons=generation.finish_reasons,
            error=None if generation.failure is None else generation.failure.message,
            token_gaps_ns=tuple(generation.token_gaps_ns),
            engine_id=self.engine_id,
        )

    def _wake(self) -> None:
        if self._wakeup is not None and not self._wakeup.done():
            self._wakeup.set_result(None)
        if self.on_news is not None:
            self.on_news()


async def merged(streams: Sequence[RequestStream]) -> AsyncGenerator[TokenDelta, None]:
    """The deltas of all streams as they come. The cost per delta does not depend on the number of streams."""
    ready = dict.fromkeys(range(len(streams)))
    wakeup = asyncio.Event()

    def listen(index: int) -> None:
        def on_news() -> None:
            ready[index] = None
            wakeup.set()

        streams[index].on_news = on_news

    for index in ready:
        listen(index)
    left = len(streams)
    try:
        while left:
            if not ready:
                wakeup.clear()
                await wakeup.wait()
            index = next(iter(ready))
            del ready[index]
            stream = streams[index]
            while (delta := stream.take_delta()) is not None:
                yield delta
            if stream.over and stream.on_news is not None:
                stream.on_news = None
                left -= 1
                ready.pop(index, None)
    finally:
        for stream in streams:
            stream.on_news = None
