"""The results of a finished request."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from llmc.runtime.binding.handle import error_name

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from llmc.runtime.binding.events import Event


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Natural-log probability of a token, and of the most likely tokens: {token id: logprob}.

    rank: 1 is the likeliest; ties rank by lowest id.
    """

    token_id: int
    logprob: float
    top: dict[int, float] = field(default_factory=dict)
    rank: int = 0


@dataclass(frozen=True)
class RequestFailure:
    """Why the engine failed a request. code: name of an llmc_status. message: one sentence with the remedy."""

    code: str
    message: str


@dataclass(frozen=True)
class TokenDelta:
    """News of a continuation: whole characters of text, with their tokens and logprobs.

    index: number of the prompt in its call. output_index: which of its n continuations.
    token_ids: tokens of the text, including a sampled eos or stop token, whose text is omitted. finish_reason,
    stop_reason, finish_detail: as of CompletionOutput, on the last delta of a continuation only.
    error: why the engine failed the request, in a delta of its own with the reason "error".
    prompt_logprobs: on the first delta of a request that asked for them.
    num_cached_tokens: prompt tokens that came from the prefix cache.
    told: whether the reader already has this from elsewhere; later deltas continue it. It has logprobs only if the
    engine drew all of its tokens again.
    pieces: the text, token by token; behind them what the end of the continuation adds.
    """

    index: int
    output_index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    finish_detail: str | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None
    num_cached_tokens: int = 0
    error: RequestFailure | None = None
    told: bool = False
    pieces: tuple[str, ...] = ()


@dataclass(frozen=True)
class CompletionOutput:
    """One continuation. token_ids: all sampled tokens, including a final eos or stop token. text: without the stop
    string or the final token.

    finish_reason: "stop", "length", "cancelled", "timeout" or "error". stop_reason: the stop string that ended it, or
    the stop token id of the request; None for eos and anything else. finish_detail: one sentence on the limit that
    ended it, if not max_tokens. logprobs: one entry per token if requested, else None.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    stop_reason: str | int | None = None
    logprobs: tuple[TokenLogprob, ...] | None = None
    finish_detail: str | None = None

    @property
    def cumulative_logprob(self) -> float | None:
        """The sum of the tokens' logprobs if requested, else None."""
        return None if self.logprobs is None else sum(one.logprob for one in self.logprobs)


@dataclass(frozen=True)
class Usage:
    """Tokens of a request. cached_tokens: prompt tokens from the prefix cache."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


@dataclass(frozen=True)
class Timings:
    """Seconds from submission. ttft_s: to the first token. tpot_s: mean between later tokens; None below two tokens."""

    ttft_s: float | None
    tpot_s: float | None
    total_s: float


def failure_at(event: Event, num_prompt_tokens: int, num_output_tokens: int) -> RequestFailure:
    """The failure in a "failed" event, given the token counts of prompt and output."""
    where = f"after {num_prompt_tokens} prompt and {num_output_tokens} output tokens"
    return RequestFailure(error_name(event.error_code), f"the request failed {where}: {event.error_message}")


@dataclass(frozen=True)
class RequestOutput:
    """A finished request. index: number of the prompt in the call. prompt: None if token ids were given.

    error: why the engine failed the request, else None; outputs then hold what came before, with the reason "error".
    prompt_logprobs: one entry per prompt token except the first, if requested; else None.
    """

    index: int
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    usage: Usage
    timings: Timings
    error: RequestFailure | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None


@dataclass(frozen=True)
class EmbeddingOutput:
    """The vector of a text. index: number of the text in the call."""

    index: int
    prompt_token_ids: tuple[int, ...]
    vector: NDArray[np.float32]


@dataclass(frozen=True)
class ScoreOutput:
    """A document's score for a query. index: number of the pair in the call."""

    index: int
    prompt_token_ids: tuple[int, ...]
    score: float


@dataclass(frozen=True)
class LabelOutput:
    """The likeliest label of a text, and all scores by label. index: number of the text in the call."""

    index: int
    prompt_token_ids: tuple[int, ...]
    label: str
    scores: dict[str, float]
