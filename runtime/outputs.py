"""What a finished request gives back."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class TokenLogprob:
    """Natural-log probability of a token, and of the most likely ones: {token id: logprob}; rank 1 is the likeliest."""

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


_CAUSES = {
    "empty_mask": "the guide allows none of the model's tokens: change the schema or grammar",
    "bucket_miss": "no bucket fits its next step and the miss policy is error: compile with larger buckets, or use the "
    "miss policy larger",
    "internal": "the model's logits are not finite numbers: check the checkpoint, or compile it with another dtype",
    "invalid_argument": "logit_bias, penalties and min_tokens leave no token to choose: relax them",
    "out_of_memory": "memory ran out: use fewer sequences or a smaller KV pool",
}


def failure_at(code: str, num_prompt_tokens: int, num_output_tokens: int) -> RequestFailure:
    """The failure that a status code tells, when prompt and output had so many tokens."""
    cause = _CAUSES.get(code, f"the engine reports {code}: run the request alone to see whether it recurs")
    where = f"after {num_prompt_tokens} prompt and {num_output_tokens} output tokens"
    return RequestFailure(code, f"the request failed {where} because {cause}")


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
