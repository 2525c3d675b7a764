"""Beam search from Python, with vLLM's names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .params import EarlyStopping, SamplingParams


@dataclass(frozen=True)
class BeamSearchParams:
    """Beam search of one request: each step keeps the beam_width likeliest continuations over all beams.

    The score of a finished beam is the sum of its logprobs divided by (number of tokens) ^ length_penalty. An eos
    counts as a token.
    early_stopping: when to end once beam_width beams have finished. False: when no running beam would score better at
    its present length. True: immediately. "never": when none could score better within max_tokens.
    logprobs: 0 … 20 alternatives per token.
    Equal parameters have equal hashes, so they may be keys.
    Raises RequestError for a value out of range, when the search begins.
    """

    beam_width: int
    max_tokens: int = 16
    ignore_eos: bool = False
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = False
    stop_token_ids: Sequence[int] = ()
    include_stop_str_in_output: bool = False
    logprobs: int = 0

    def __post_init__(self) -> None:
        if isinstance(self.stop_token_ids, list):
            object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))

    def sampling(self) -> SamplingParams:
        """Parameters for `generate` that return all beams."""
        return SamplingParams(
            n=self.beam_width,
            beam_width=self.beam_width,
            max_tokens=self.max_tokens,
            ignore_eos=self.ignore_eos,
            length_penalty=self.length_penalty,
            early_stopping=self.early_stopping,
            stop_token_ids=self.stop_token_ids,
            include_stop_str_in_output=self.include_stop_str_in_output,
            logprobs=self.logprobs,
        )
