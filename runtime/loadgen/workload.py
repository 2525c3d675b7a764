"""The requests' content: prompts of exact lengths from random tokens, of a trace's shapes, or given ones."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

ENDPOINTS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
FIRST_ID = 8
"""Smaller ids are often special tokens, which random prompts avoid."""
_WORDS = ("the", "of", "and", "to", "in", "is", "that", "it", "was", "for", "on", "are", "as", "with", "his", "they")

Prompt = str | list[int] | Sequence[Mapping[str, Any]]


class WorkloadError(ValueError):
    """A workload cannot be made, or does not fit the endpoint; the message is one sentence."""


@dataclass(frozen=True)
class Ask:
    """One request. prompt: text, token ids or messages. input_len: tokens; None if only the server can count them.
    output_len: tokens to generate, at most or exactly."""

    prompt: Prompt
    input_len: int | None
    output_len: int


class Workload(Protocol):
    """Requests by index; deterministic, created on demand."""

    def __len__(self) -> int: ...

    def ask(self, index: int) -> Ask: ...


@dataclass(frozen=True)
class Lengths:
    """Tokens of each request: input_len, output_len int64 [N]. num_clipped: requests clipped to the model's length."""

    input_len: npt.NDArray[np.int64]
    output_len: npt.NDArray[np.int64]
    num_clipped: int = 0

    @classmethod
    def uniform(cls, count: int, input_len: int, output_len: int, range_ratio: float, seed: int) -> Lengths:
        """Lengths drawn evenly from len · (1 - range_ratio) to len · (1 + range_ratio), at least 1."""
        if not 0 <= range_ratio < 1:
            raise WorkloadError(f"range ratio {range_ratio:g} is out of range: use 0 or more and less than 1")
        draw = np.random.default_rng([seed, 2])

        def some(length: int) -> npt.NDArray[np.int64]:
            low, high = max(1, round(length * (1 - range_ratio))), max(1, round(length * (1 + range_ratio)))
            return draw.integers(low, high + 1, count)

        return cls(some(input_len), some(output_len))

    def clipped(self, max_model_len: int | None) -> Lengths:
        """Clips to max_model_len: outputs keep up to half of it, prompts get the rest."""
        if max_model_len is None:
            return self
        output = np.minimum(self.output_len, max(1, max_model_len // 2))
        prompt = np.minimum(self.input_len, max_model_len - output)
        over = self.input_len + self.output_len > max_model_len
        # What fits as a whole keeps its output even beyond the half.
        output, prompt = np.where(over, output, self.output_len), np.where(over, prompt, self.input_len)
        return Lengths(prompt, output, int(over.sum()))


@dataclass(frozen=True)
class RandomTokens:
    """Prompts of random token ids from FIRST_ID to vocab_size - 1.

    prefix_len: leading tokens shared by all prompts. blocks: as in traces, ids of each prompt's leading blocks of
    block_len tokens; equal ids mean equal tokens.
    """

    lengths: Lengths
    vocab_size: int
    seed: int = 0
    prefix_len: int = 0
    blocks: Sequence[npt.NDArray[np.int64]] = ()
    block_len: int = 512

    def __post_init__(self) -> None:
        if self.vocab_size <= FIRST_ID:
            raise WorkloadError(f"vocabulary of {self.vocab_size} tokens is too small: use more than {FIRST_ID}")

    def __len__(self) -> int:
        return len(self.lengths.input_len)

    def ask(self, index: int) -> Ask:
        length = int(self.lengths.input_len[index])
        parts = [self._draw(3, 0, self.prefix_len)] if self.prefix_len else []
        if len(self.blocks):
            parts += [self._draw(4, int(block), self.block_len) for block in self.blocks[index]]
        missing = length - sum(map(len, parts))
        if missing > 0:
            parts.append(self._draw(5, index, missing))
        ids: list[int] = np.concatenate(parts)[:length].tolist()
        return Ask(ids, length, int(self.lengths.output_len[index]))

    def _draw(self, kind: int, number: int, count: int) -> npt.NDArray[np.int64]:
        return np.random.default_rng([self.seed, kind, number]).integers(FIRST_ID, self.vocab_size, count)


@dataclass(frozen=True)
class GivenPrompts:
    """The prompts of a file, again from the first when there are too few."""

    prompts: Sequence[Prompt]
    count: int
    output_len: int

    def __len__(self) -> int:
        return self.count

    def ask(self, index: int) -> Ask:
        prompt = self.prompts[index % len(self.prompts)]
        known = len(prompt) if isinstance(prompt, list) and isinstance(prompt[0], int) else None
        return Ask(prompt, known, self.output_len)


def request_body(ask: Ask, endpoint: str, model: str, extra: Mapping[str, Any], *, ignore_eos: bool) -> bytes:
    """The JSON body of a streamed request with final usage. Raises WorkloadError.

    extra: further fields, which take precedence. On the chat endpoint, token ids become the same number of English
    words.
    """
    prompt = ask.prompt
    conversation = not isinstance(prompt, str) and not (prompt and isinstance(prompt[0], int))
    body: dict[str, Any] = {"model": model, "stream": True, "stream_options": {"include_usage": True}}
    if endpoint == "chat":
        text = prompt if isinstance(prompt, str) else " ".join(_WORDS[i % len(_WORDS)] for i in _ids(prompt))
        body["messages"] = prompt if conversation else [{"role": "user", "content": text}]
    elif conversation:
        raise WorkloadError("the data set holds conversations: use --endpoint chat")
    else:
        body["prompt"] = prompt
    body["max_tokens"] = ask.output_len
    body["temperature"] = 0.0
    if ignore_eos:
        body["ignore_eos"] = True
        body["min_tokens"] = ask.output_len
    return json.dumps({**body, **extra}, separators=(",", ":")).encode()


def _ids(prompt: Prompt) -> list[int]:
    return [item for item in prompt if isinstance(item, int)]
