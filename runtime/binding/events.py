"""Events of continuations, as the engine reports them."""

from __future__ import annotations

import dataclasses

from llmc.runtime.binding import abi

EVENT_KINDS = ("token", "finished", "failed", "prompt_logprobs", "needs_mask")
FINISH_REASONS = (None, "stop", "length", "cancelled", "error", "timeout")


# Not frozen: one object per token, and a frozen one takes six times as long to create.
@dataclasses.dataclass(slots=True)
class Event:
    """An event of a continuation. kind: one of EVENT_KINDS. top_logprobs: (token id, logprob), best first.

    token_id: the token; for "finished", the eos or stop id that ended it; else -1. num_output_tokens: sampled so far,
    this one included. position: of the token, counted from the prompt's first. rank: with a logprob, 1 for the
    likeliest token, ties by lowest id; else 0.
    error_message: one sentence for "failed"; else empty.
    Times are on time.monotonic_ns(); arrival_ns to first_token_ns come with "finished" and "failed", 0 for never.
    """

    kind: str
    request_id: int
    output_index: int
    token_id: int
    finish_reason: str | None
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    error_code: int
    logprob: float
    top_logprobs: tuple[tuple[int, float], ...]
    time_ns: int
    position: int
    rank: int
    arrival_ns: int
    first_scheduled_ns: int
    first_token_ns: int
    error_message: str = ""


def event_of(native: abi.Event) -> Event:
    """The event in a llmc_event."""
    top = native.num_top
    return Event(
        kind=EVENT_KINDS[native.kind],
        request_id=native.request_id,
        output_index=native.output_index,
        token_id=native.token_id,
        finish_reason=FINISH_REASONS[native.finish_reason],
        num_prompt_tokens=native.num_prompt_tokens,
        num_cached_tokens=native.num_cached_tokens,
        num_output_tokens=native.num_output_tokens,
        error_code=native.error_code,
        logprob=native.logprob,
        top_logprobs=tuple(zip(native.top_token_ids[:top], native.top_logprobs[:top], strict=True)) if top else (),
        time_ns=native.time_ns,
        position=native.position,
        rank=native.rank,
        arrival_ns=native.arrival_ns,
        first_scheduled_ns=native.first_scheduled_ns,
        first_token_ns=native.first_token_ns,
        error_message=native.message.decode("utf-8", "replace") if native.error_code else "",
    )
