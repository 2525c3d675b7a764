"""What a finished request gives back."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from .handle import error_name

if TYPE_CHECKING:
    from .engine import Event


@dataclass(frozen=True)
class TokenLogprob:
    """Natural-log probability of a token, and of the most likely ones: {token id: logprob}.

    rank: 1 is the likeliest; equal ones rank by id, lowest first.
    """

    token_id: int
    logprob: float
    top: dict[int, float] = field(default_factory=dict)
    rank: int = 0


@dataclass(frozen=True)
class CompletionOutput:
    """One continuation. text: without the stop string; token_ids: without the token that ended it.

    finish_reason: "stop", "length", "cancelled", "timeout" or "error". stop_reason: the stop string or stop token id
    that ended it, None for anything else. logprobs: one entry a token when asked for, else None.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    stop_reason: str | int | None = None
    logprobs: tuple[TokenLogprob, ...] | None = None


@dataclass(frozen=True)
class Usage:
    """Tokens of a request; cached_tokens are those of the prompt that came from the prefix cache."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


@dataclass(frozen=True)
class Timings:
    """Seconds from submission. ttft_s: to the first token; tpot_s: mean between later tokens, None below two tokens."""

    ttft_s: float | None
    tpot_s: float | None
    total_s: float


@dataclass(frozen=True)
class RequestFailure:
    """Why the engine failed a request. code: name of an llmc_status; message: one sentence with what to do next."""

    code: str
    message: str


def failure_at(event: Event, num_prompt_tokens: int, num_output_tokens: int) -> RequestFailure:
    """The failure that a "failed" event tells, when prompt and output had so many tokens."""
    where = f"after {num_prompt_tokens} prompt and {num_output_tokens} output tokens"
    return RequestFailure(error_name(event.error_code), f"the request failed {where}: {event.error_message}")


@dataclass(frozen=True)
class RequestOutput:
    """A finished request; index counts the prompts of the call. prompt is None when token ids were given.

    error: why the engine failed the request, whose outputs then hold what came before and end with the reason "error";
    else None. prompt_logprobs: one entry a token of the prompt but the first when asked for, else None.
    """

    index: int
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    usage: Usage
    timings: Timings
    error: RequestFailure | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None
