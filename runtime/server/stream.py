"""One request on its way: the engine's events in, deltas of text out."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

from llmc.runtime.detokenizer import OutputText
from llmc.runtime.engine import Event
from llmc.runtime.outputs import RequestFailure, TokenLogprob, failure_at
from llmc.runtime.tokenizer import Tokenizer

from .requests import EngineRequest, RequestFailed, RequestRecord, TokenDelta

log = logging.getLogger("llmc.server")


class _Output:
    """What one continuation has gained since its consumer last looked."""

    def __init__(self, text: OutputText) -> None:
        self.text = text
        self.num_tokens = 0
        self.last_token_ns = 0
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None
        self.new_text: list[str] = []
        self.new_token_ids: list[int] = []
        self.new_logprobs: list[TokenLogprob] = []
        self.changed = False
        self.finish_told = False


class RequestStream:
    """An asynchronous iterator of TokenDelta; lives on the event loop's thread.

    Deltas that its consumer has not taken yet are merged, so a slow reader holds the text of its answer and no more.
    Closing it cancels the request. Raises RequestFailed where the engine failed the request.
    """

    def __init__(self, request: EngineRequest, tokenizer: Tokenizer | None, cancel: Callable[[], None]) -> None:
        self.request = request
        params = request.params
        special = request.skip_special_tokens
        self._decode = _no_text if tokenizer is None else lambda ids: tokenizer.decode(ids, skip_special_tokens=special)
        self._outputs = [
            _Output(OutputText(self._decode, request.prompt_token_ids, params.stop, params.min_tokens))
            for _ in range(params.n)
        ]
        self._cancel = cancel
        self._prompt_logprobs: list[TokenLogprob] | None = None if request.prompt_logprobs is None else []
        self._num_cached_tokens = 0
        self._num_finished_by_engine = 0
        self._failure: RequestFailure | None = None
        self._closed = False
        self._wakeup: asyncio.Future[None] | None = None
        self._record: RequestRecord | None = None
        self._token_gaps_ns: list[int] = []
        self.started_ns = time.monotonic_ns()

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> TokenDelta:
        while True:
            delta = self._next_delta()
            if delta is not None:
                return delta
            if self._failure is not None:
                raise RequestFailed(self._failure)
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
        return all(output.finish_reason is not None for output in self._outputs)

    @property
    def engine_done(self) -> bool:
        """The engine has nothing more to say about this request."""
        return self._num_finished_by_engine == len(self._outputs)

    @property
    def num_output_tokens(self) -> int:
        """Tokens of all continuations so far."""
        return sum(output.num_tokens for output in self._outputs)

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens that came from the prefix cache, known with the first token."""
        return self._num_cached_tokens

    @property
    def record(self) -> RequestRecord | None:
        """Set once `engine_done`."""
        return self._record

    def take(self, event: Event) -> None:
        """Takes an event of the engine that is about this request."""
        self._num_cached_tokens = max(self._num_cached_tokens, event.num_cached_tokens)
        try:
            self._take(event)
        except Exception as error:  # whatever a tokenizer's decoder raises must end this request, not the others
            log.exception("request %s failed", self.request.request_id)
            self.fail(RequestFailure("internal", f"the answer cannot be turned into text: {error}"))
        if event.kind in ("finished", "failed"):
            self._count_end(event)
        self._wake()

    def finish_output(self, output_index: int) -> None:
        """Ends a continuation whose text is complete, as when its grammar allows nothing more."""
        self._finish(self._outputs[output_index], "stop")
        self._wake()

    def fail(self, failure: RequestFailure) -> None:
        """Ends what still runs; the consumer gets RequestFailed after the deltas so far."""
        self._failure = self._failure or failure
        for output in self._outputs:
            if output.finish_reason is None:
                output.finish_reason = "error"
        self._wake()

    def _take(self, event: Event) -> None:
        if event.kind == "token":
            self._take_token(event)
        elif event.kind == "prompt_logprobs":
            assert self._prompt_logprobs is not None
            self._prompt_logprobs.append(_token_logprob(event))
        elif event.kind == "finished":
            self._take_end(event)
        elif event.kind == "failed":
            num_output_tokens = max(output.num_tokens for output in self._outputs)
            self.fail(failure_at(event, len(self.request.prompt_token_ids), num_output_tokens))

    def _take_token(self, event: Event) -> None:
        output = self._outputs[event.output_index]
        if output.finish_reason is not None:
            return
        if output.num_tokens:
            self._token_gaps_ns.append(event.time_ns - output.last_token_ns)
        output.num_tokens += 1
        output.last_token_ns = event.time_ns
        output.new_token_ids.append(event.token_id)
        if self.request.params.logprobs is not None:
            output.new_logprobs.append(_token_logprob(event))
        output.new_text.append(output.text.push(event.token_id))
        output.changed = True
        if output.text.stop_reason is not None:
            self._finish(output, "stop")

    def _take_end(self, event: Event) -> None:
        output = self._outputs[event.output_index]
        if output.finish_reason is None:
            stopped_by = event.token_id if event.finish_reason == "stop" and event.token_id >= 0 else None
            output.stop_reason = stopped_by if stopped_by in self.request.params.stop_token_ids else None
            self._finish(output, event.finish_reason or "stop")
            if output.stop_reason == stopped_by is not None and self.request.include_stop_str_in_output:
                output.new_text.append(self._decode([stopped_by]))

    def _count_end(self, event: Event) -> None:
        self._num_finished_by_engine += 1
        if self.engine_done:
            self._record = RequestRecord(
                request_id=self.request.request_id,
                arrival_ns=event.arrival_ns,
                first_scheduled_ns=event.first_scheduled_ns,
                first_token_ns=event.first_token_ns,
                finished_ns=event.time_ns,
                num_prompt_tokens=len(self.request.prompt_token_ids),
                num_cached_tokens=self._num_cached_tokens,
                num_output_tokens=self.num_output_tokens,
                finish_reasons=tuple(output.finish_reason or "error" for output in self._outputs),
                error=None if self._failure is None else self._failure.message,
                token_gaps_ns=tuple(self._token_gaps_ns),
            )

    def _finish(self, output: _Output, reason: str) -> None:
        if output.finish_reason is not None:
            return
        output.new_text.append(output.text.finish())
        if output.text.stop_reason is not None:
            reason, output.stop_reason = "stop", output.text.stop_reason
            if self.request.include_stop_str_in_output:
                output.new_text.append(output.text.stop_reason)
        output.finish_reason = reason
        output.changed = True

    def _next_delta(self) -> TokenDelta | None:
        for index, output in enumerate(self._outputs):
            if not output.changed or output.finish_told:
                continue
            text, token_ids = "".join(output.new_text), tuple(output.new_token_ids)
            logprobs = None if self.request.params.logprobs is None else tuple(output.new_logprobs)
            output.new_text, output.new_token_ids, output.new_logprobs = [], [], []
            output.changed, output.finish_told = False, output.finish_reason is not None
            prompt_logprobs, self._prompt_logprobs = self._prompt_logprobs, None
            return TokenDelta(
                output_index=index,
                text=text,
                token_ids=token_ids,
                logprobs=logprobs,
                finish_reason=None if output.finish_reason == "error" else output.finish_reason,
                stop_reason=output.stop_reason,
                prompt_logprobs=None if prompt_logprobs is None else tuple(prompt_logprobs),
                num_cached_tokens=self._num_cached_tokens,
            )
        return None

    def _wake(self) -> None:
        if self._wakeup is not None and not self._wakeup.done():
            self._wakeup.set_result(None)


def _token_logprob(event: Event) -> TokenLogprob:
    return TokenLogprob(event.token_id, event.logprob, dict(event.top_logprobs), event.rank)


def _no_text(token_ids: Sequence[int]) -> str:
    return ""
