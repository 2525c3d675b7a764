"""A request in progress: turns the engine's events into text, tokens, logprobs and finish reasons of continuations.

`LLM`, `AsyncLLM` and the server all use this class. It knows neither threads nor HTTP.
"""

from __future__ import annotations

import logging
import time
from array import array
from collections.abc import Callable, Mapping, Sequence

from llmc.runtime.binding.events import Event
from llmc.runtime.text.detokenizer import Decode, OutputText
from llmc.runtime.text.tokenizer import Tokenizer

from .context_limit import ContextLimit
from .outputs import RequestFailure, Timings, TokenDelta, TokenLogprob, failure_at
from .params import SamplingParams

log = logging.getLogger("llmc")


def decoder(tokenizer: Tokenizer | None, params: SamplingParams) -> Decode:
    """A function from token ids to text, with a request's options; without a tokenizer all text is empty."""
    if tokenizer is None:
        return lambda token_ids: ""
    # Looked up on each call, so that tests can wrap the tokenizer.
    return lambda token_ids: tokenizer.decode(token_ids, skip_special_tokens=params.skip_special_tokens)


class _Output:
    """One continuation, and its news since the last look. text: None before its first token, since thousands may
    wait."""

    __slots__ = (
        *("text", "num_tokens", "last_token_ns", "finish_reason", "stop_reason", "finish_detail"),
        *("new_text", "new_token_ids", "new_logprobs", "changed", "finish_told"),
        *("told_token_ids", "told_text", "told_logprobs", "owes_told"),
    )

    def __init__(self, told_token_ids: Sequence[int]) -> None:
        self.text: OutputText | None = None
        self.num_tokens = 0
        self.last_token_ns = 0
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None
        self.finish_detail: str | None = None
        self.new_text: list[str] = []
        self.new_token_ids: list[int] = []
        self.new_logprobs: list[TokenLogprob] = []
        self.changed = False
        self.finish_told = False
        self.told_token_ids = told_token_ids
        self.told_text: list[str] = []
        self.told_logprobs: list[TokenLogprob] = []
        self.owes_told = bool(told_token_ids)


class Diverged(Exception):
    """The engine drew another token than another engine did for the same request."""


class Generation:
    """Takes the events of one request, in order, and returns deltas on demand; deltas not yet taken are merged.

    index: copied to the deltas. decode: from `decoder`. limit: names the limit that ends a full request. told: tokens,
    by output index, that the reader already has. They form a separate delta, and the request fails if the engine draws
    others. resumes: the only continuation; the engine was given all its told tokens but the last.
    """

    def __init__(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        decode: Decode,
        limit: ContextLimit | None = None,
        index: int = 0,
        *,
        told: Mapping[int, Sequence[int]] | None = None,
        resumes: int | None = None,
    ) -> None:
        self.num_prompt_tokens = len(prompt_token_ids)
        self.params = params
        self.index = index
        self.num_cached_tokens = 0
        self.failure: RequestFailure | None = None
        self.token_gaps_ns = array("q")
        self._limit = limit
        self.first_token_ns = 0
        self._first_output = resumes or 0
        self._outputs = [_Output((told or {}).get(self._first_output + place, ())) for place in range(params.n)]
        self._make_text: Callable[[], OutputText] = lambda: OutputText(
            decode, prompt_token_ids, params.stop, params.min_tokens
        )
        self._prompt_logprobs: list[TokenLogprob] | None = None if params.prompt_logprobs is None else []
        self._num_ended = self._num_ended_by_engine = 0
        if resumes is not None:
            self._give(self._outputs[0])

    @property
    def done(self) -> bool:
        """Whether all continuations have ended, even if their last deltas were not taken."""
        return self._num_ended == len(self._outputs)

    @property
    def engine_done(self) -> bool:
        """Whether the engine has nothing more to report. False if a stop string or a guide ended a text early."""
        return self._num_ended_by_engine == len(self._outputs)

    @property
    def num_output_tokens(self) -> int:
        """Tokens of all continuations so far."""
        return sum(output.num_tokens for output in self._outputs)

    @property
    def finish_reasons(self) -> tuple[str, ...]:
        """Per continuation; "error" for an unfinished one."""
        return tuple(output.finish_reason or "error" for output in self._outputs)

    def timings(self, submit_ns: int) -> Timings:
        """Times since submission. submit_ns: on time.monotonic_ns()."""
        first, last = self.first_token_ns, max(output.last_token_ns for output in self._outputs)
        # With n > 1 continuations run in parallel: time per token is that of a single one.
        steps = max(output.num_tokens for output in self._outputs) - 1
        return Timings(
            ttft_s=(first - submit_ns) / 1e9 if first else None,
            tpot_s=(last - first) / 1e9 / steps if steps > 0 else None,
            total_s=(time.monotonic_ns() - submit_ns) / 1e9,
        )

    def take(self, event: Event) -> None:
        """Takes an event of this request."""
        self.num_cached_tokens = max(self.num_cached_tokens, event.num_cached_tokens)
        if event.kind in ("finished", "failed"):
            self._num_ended_by_engine += 1
        try:
            self._take(event)
        except Diverged as error:
            self.fail(RequestFailure("diverged", str(error)))
        except Exception as error:  # any exception of a tokenizer's decoder must end only this request
            log.debug("the answer of a request cannot be turned into text", exc_info=True)
            self.fail(RequestFailure("internal", f"the answer cannot be turned into text: {error}"))

    def finish_output(self, output_index: int) -> None:
        """Ends a continuation whose text is complete, as when its grammar allows nothing more."""
        self._finish(self._outputs[output_index], "stop")

    def fail(self, failure: RequestFailure) -> None:
        """Ends all running continuations with the reason "error"."""
        self.failure = self.failure or failure
        for output in self._outputs:
            if output.finish_reason is None:
                output.finish_reason, output.changed = "error", True
                self._num_ended += 1

    def next_delta(self) -> TokenDelta | None:
        """The news of a continuation; None if there are none."""
        for index, output in enumerate(self._outputs):
            if not output.changed or output.finish_told:
                continue
            if output.owes_told and output.num_tokens < len(output.told_token_ids) and output.finish_reason is None:
                continue
            if output.owes_told and output.num_tokens >= len(output.told_token_ids):
                return self._told(index, output)
            failed = output.finish_reason == "error"
            # News before an error are a separate delta: a reader may raise at the error.
            before = failed and bool(output.new_token_ids or any(output.new_text))
            ended = output.finish_reason is not None and not before
            pieces, token_ids = tuple(output.new_text), tuple(output.new_token_ids)
            logprobs = None if self.params.logprobs is None else tuple(output.new_logprobs)
            output.new_text, output.new_token_ids, output.new_logprobs = [], [], []
            output.changed, output.finish_told = before, ended
            prompt_logprobs = self._take_prompt_logprobs()
            return TokenDelta(
                index=self.index,
                output_index=self._first_output + index,
                text="".join(pieces),
                token_ids=token_ids,
                logprobs=logprobs,
                finish_reason=output.finish_reason if ended else None,
                stop_reason=output.stop_reason if ended else None,
                finish_detail=output.finish_detail if ended else None,
                prompt_logprobs=prompt_logprobs,
                num_cached_tokens=self.num_cached_tokens,
                error=self.failure if failed and ended else None,
                pieces=pieces,
            )
        return None

    def _give(self, output: _Output) -> None:
        """Advances a continuation to the point where the engine resumes it."""
        for token_id in output.told_token_ids[:-1]:
            output.told_text.append(self._text(output).push(token_id))
            output.num_tokens += 1

    def _told(self, index: int, output: _Output) -> TokenDelta:
        output.owes_told, logprobs = False, output.told_logprobs
        output.changed = bool(output.new_token_ids) or output.finish_reason is not None
        return TokenDelta(
            index=self.index,
            output_index=self._first_output + index,
            text="".join(output.told_text),
            token_ids=tuple(output.told_token_ids),
            logprobs=tuple(logprobs) if len(logprobs) == len(output.told_token_ids) else None,
            prompt_logprobs=self._take_prompt_logprobs(),
            num_cached_tokens=self.num_cached_tokens,
            told=True,
            pieces=tuple(output.told_text),
        )

    def _take_prompt_logprobs(self) -> tuple[TokenLogprob, ...] | None:
        found, self._prompt_logprobs = self._prompt_logprobs, None
        return None if found is None else tuple(found)

    def _take(self, event: Event) -> None:
        if event.kind == "token":
            output = self._outputs[event.output_index]
            if output.finish_reason is None:
                self._count(output, event)
                text = self._text(output)
                told = output.num_tokens <= len(output.told_token_ids)
                (output.told_text if told else output.new_text).append(text.push(event.token_id))
                if text.stop_reason is not None:
                    self._finish(output, "stop")
        elif event.kind == "prompt_logprobs":
            if self._prompt_logprobs is not None:
                self._prompt_logprobs.append(_token_logprob(event))
        elif event.kind == "finished":
            self._take_end(self._outputs[event.output_index], event)
        elif event.kind == "failed":
            num_output_tokens = max(output.num_tokens for output in self._outputs)
            self.fail(failure_at(event, self.num_prompt_tokens, num_output_tokens))

    def _take_end(self, output: _Output, event: Event) -> None:
        if output.finish_reason is not None:
            return
        end = event.token_id if event.finish_reason == "stop" and event.token_id >= 0 else None
        if end is not None:
            self._count(output, event)
        output.stop_reason = end if end in self.params.stop_token_ids else None
        self._finish(output, event.finish_reason or "stop", end)

    def _count(self, output: _Output, event: Event) -> None:
        """Counts a sampled token, within the text or at its end."""
        if output.num_tokens:
            self.token_gaps_ns.append(event.time_ns - output.last_token_ns)
        self.first_token_ns = self.first_token_ns or event.time_ns
        output.last_token_ns = event.time_ns
        output.num_tokens += 1
        output.changed = True
        if output.num_tokens <= len(output.told_token_ids):
            self._check_told(output, event.token_id)
            if self.params.logprobs is not None:
                output.told_logprobs.append(_token_logprob(event))
            return
        output.new_token_ids.append(event.token_id)
        if self.params.logprobs is not None:
            output.new_logprobs.append(_token_logprob(event))

    def _check_told(self, output: _Output, token_id: int) -> None:
        told = output.told_token_ids[output.num_tokens - 1]
        if token_id != told:
            raise Diverged(
                f"token {output.num_tokens} of the answer is {token_id}, and {told} where it began: "
                "serve the same artifact, built for the same target, everywhere"
            )

    def _text(self, output: _Output) -> OutputText:
        if output.text is None:
            output.text = self._make_text()
        return output.text

    def _finish(self, output: _Output, reason: str, end: int | None = None) -> None:
        if output.finish_reason is not None:
            return
        shown = self.params.include_stop_str_in_output
        if output.num_tokens:
            text = self._text(output)
            output.new_text.append(text.finish(end if shown else None))
            if text.stop_reason is not None:
                reason, output.stop_reason = "stop", text.stop_reason
                if shown:
                    output.new_text.append(text.stop_reason)
        if reason == "length" and self._limit is not None:
            output.finish_detail = self._limit.finish_detail(self.num_prompt_tokens + output.num_tokens)
        output.finish_reason, output.changed = reason, True
        self._num_ended += 1


def _token_logprob(event: Event) -> TokenLogprob:
    return TokenLogprob(event.token_id, event.logprob, dict(event.top_logprobs), event.rank)
