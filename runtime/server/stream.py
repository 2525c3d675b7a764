"""One request on its way: the engine's events in, deltas of text out, on an event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence

from llmc.runtime.context_limit import ContextLimit
from llmc.runtime.engine import Event
from llmc.runtime.generation import Generation, decoder
from llmc.runtime.outputs import RequestFailure, TokenDelta
from llmc.runtime.tokenizer import Tokenizer

from .requests import EngineRequest, RequestRecord


class RequestStream:
    """An asynchronous iterator of TokenDelta; lives on the event loop's thread.

    Deltas that its consumer has not taken yet are merged, so a slow reader holds the text of its answer and no more.
    Closing it cancels the request. Where the engine failed the request, the last deltas have an `error`.
    """

    def __init__(
        self,
        request: EngineRequest,
        tokenizer: Tokenizer | None,
        cancel: Callable[[], None],
        limit: ContextLimit | None = None,
    ) -> None:
        self.request = request
        params = request.params
        decode = decoder(tokenizer, params)
        self.generation = Generation(request.prompt_token_ids, params, decode, limit, request.index)
        self._cancel = cancel
        self._closed = False
        self._wakeup: asyncio.Future[None] | None = None
        self._record: RequestRecord | None = None
        self.started_ns = time.monotonic_ns()

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> TokenDelta:
        while True:
            delta = self.generation.next_delta()
            if delta is not None:
                return delta
            if self._closed or self.done:
                raise StopAsyncIteration
            self._wakeup = asyncio.get_running_loop().create_future()
            try:
                await self._wakeup
            finally:
                self._wakeup = None

    def close(self) -> None:
        """Ends the iteration; a request that still runs is cancelled before the engine's next step."""
        if not self._closed:
            self._closed = True
            if not self.engine_done:
                self._cancel()
            self._wake()

    @property
    def done(self) -> bool:
        """All continuations have ended, whether or not their last deltas were taken."""
        return self.generation.done

    @property
    def engine_done(self) -> bool:
        """The engine has nothing more to say about this request."""
        return self.generation.engine_done

    @property
    def num_output_tokens(self) -> int:
        """Tokens of all continuations so far."""
        return self.generation.num_output_tokens

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens that came from the prefix cache, known with the first token."""
        return self.generation.num_cached_tokens

    @property
    def record(self) -> RequestRecord | None:
        """Set once `engine_done`."""
        return self._record

    def take(self, event: Event) -> None:
        """Takes an event of the engine that is about this request."""
        self.generation.take(event)
        if self.engine_done:
            self._keep_record(event)
        self._wake()

    def finish_output(self, output_index: int) -> None:
        """Ends a continuation whose text is complete, as when its grammar allows nothing more."""
        self.generation.finish_output(output_index)
        self._wake()

    def fail(self, failure: RequestFailure) -> None:
        """Ends what still runs; the consumer gets the error after the deltas so far."""
        self.generation.fail(failure)
        self._wake()

    def _keep_record(self, event: Event) -> None:
        generation = self.generation
        self._record = RequestRecord(
            request_id=self.request.request_id,
            arrival_ns=event.arrival_ns,
            first_scheduled_ns=event.first_scheduled_ns,
            first_token_ns=event.first_token_ns,
            finished_ns=event.time_ns,
            num_prompt_tokens=generation.num_prompt_tokens,
            num_cached_tokens=generation.num_cached_tokens,
            num_output_tokens=generation.num_output_tokens,
            finish_reasons=generation.finish_reasons,
            error=None if generation.failure is None else generation.failure.message,
            token_gaps_ns=tuple(generation.token_gaps_ns),
        )

    def _wake(self) -> None:
        if self._wakeup is not None and not self._wakeup.done():
            self._wakeup.set_result(None)


async def merged(streams: Sequence[RequestStream]) -> AsyncGenerator[TokenDelta, None]:
    """The deltas of all streams as they come. Raises what one of them raises."""
    if len(streams) == 1:
        async for delta in streams[0]:
            yield delta
        return
    waiting = {asyncio.ensure_future(anext(stream, None)): index for index, stream in enumerate(streams)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=lambda t: waiting[t]):
                index, told = waiting.pop(task), task.result()
                if told is not None:
                    waiting[asyncio.ensure_future(anext(streams[index], None))] = index
                    yield told
    finally:
        for task in waiting:
            task.cancel()
