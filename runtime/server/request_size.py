"""Upper bound of the memory that a request may hold, and the fields to lower where it is too much.

The figures are those of 64-bit CPython, measured and rounded up; docs/serving.md has the measurements. They count what
grows with a request: its objects here and in the engine. The KV cache is a separate pool and not counted.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from .requests import EngineRequest

BODY_FACTOR = 16  # parsed JSON of whole numbers; text takes three
_PROMPT = 12 << 10
_PROMPT_TOKEN = 64
_SEQUENCE = 3 << 10
_SEQUENCE_TOKEN = 4  # the engine keeps a copy of the prompt per continuation
_TOKEN = 160
_LOGPROB, _ALTERNATIVE = 320, 128
_LOGPROB_TOLD, _ALTERNATIVE_TOLD = 600, 600  # in an answer sent as one piece of JSON
_PROMPT_LOGPROB, _PROMPT_ALTERNATIVE = 900, 600
_GUIDE = 32 << 10
_VECTOR_NUMBER = 64  # as a number, and as text in an answer
_ROW_COPIES = 2  # of an image's rows: here, and in the engine
_TOKENS_A_MASK_BYTE = 4  # a mask has one bit per token, here and in the engine


@dataclass(frozen=True)
class RequestSize:
    """Figures that determine the memory of one HTTP request.

    prompt_tokens: of each prompt. max_tokens: longest continuation that `EngineRequest` asks for and max_model_len
    allows. logprobs, prompt_logprobs: number of alternatives, None for none. streams: sent tokens are forgotten.
    vector_width: numbers in each prompt's vector. row_bytes: of images. n: continuations at once; the field n_field
    asks for them.
    """

    prompt_tokens: Sequence[int]
    n: int
    max_tokens: int
    logprobs: int | None
    prompt_logprobs: int | None
    guided: bool
    streams: bool
    max_model_len: int
    vocab_size: int
    vector_width: int = 0
    row_bytes: int = 0
    n_field: str = "n"

    @classmethod
    def of(
        cls, requests: Sequence[EngineRequest], max_model_len: int, vocab_size: int, *, streams: bool
    ) -> RequestSize:
        """From the prompts of an HTTP request: at least one; all share their parameters."""
        params = requests[0].params
        return cls(
            prompt_tokens=tuple(len(request.prompt_token_ids) for request in requests),
            n=params.num_drawn,
            n_field="best_of" if params.num_drawn > params.n else "n",
            max_tokens=params.max_tokens,
            logprobs=params.logprobs,
            prompt_logprobs=params.prompt_logprobs,
            guided=requests[0].guide is not None,
            streams=streams,
            max_model_len=max_model_len,
            vocab_size=vocab_size,
            vector_width=requests[0].vector_width,
            row_bytes=sum(placed.rows.nbytes for request in requests for placed in request.placed),
        )

    @property
    def bytes(self) -> int:
        """The most bytes that the request may hold, without its body."""
        token = _TOKEN + _entry(self.logprobs, _LOGPROB, _ALTERNATIVE)
        if not self.streams:
            token += _entry(self.logprobs, _LOGPROB_TOLD, _ALTERNATIVE_TOLD)
        prompt_token = _PROMPT_TOKEN + _entry(self.prompt_logprobs, _PROMPT_LOGPROB, _PROMPT_ALTERNATIVE)
        total = 0
        for prompt in self.prompt_tokens:
            output = min(self.max_tokens, max(1, self.max_model_len - prompt))
            sequence = _SEQUENCE + _SEQUENCE_TOKEN * (prompt + output) + output * token
            total += _PROMPT + prompt * prompt_token + self.n * sequence + _VECTOR_NUMBER * self.vector_width
        total += _ROW_COPIES * self.row_bytes
        if self.guided:
            total += self.n * len(self.prompt_tokens) * (_GUIDE + self.vocab_size // _TOKENS_A_MASK_BYTE)
        return total

    def advice(self) -> tuple[str, str]:
        """The field that lowers the figure most, and the factors, as "1024 prompts × n 64 × …"."""
        longest = max(self.prompt_tokens)
        without = {
            "prompt": dataclasses.replace(self, prompt_tokens=(longest,)),
            self.n_field: dataclasses.replace(self, n=1),
            "max_tokens": dataclasses.replace(self, max_tokens=1),
            "logprobs": dataclasses.replace(self, logprobs=None),
            "prompt_logprobs": dataclasses.replace(self, prompt_logprobs=None),
        }
        field = min(without, key=lambda name: without[name].bytes)
        output = min(self.max_tokens, max(1, self.max_model_len - min(self.prompt_tokens)))
        factors = [f"{len(self.prompt_tokens)} prompts"] if len(self.prompt_tokens) > 1 else []
        factors += [f"{self.n_field} {self.n}"] if self.n > 1 else []
        factors.append(f"{output} tokens")
        factors += [f"logprobs {self.logprobs}"] if self.logprobs is not None else []
        factors += [f"prompt_logprobs {self.prompt_logprobs}"] if self.prompt_logprobs is not None else []
        return field, " × ".join(factors)


def _entry(alternatives: int | None, chosen: int, each: int) -> int:
    return 0 if alternatives is None else chosen + alternatives * each
