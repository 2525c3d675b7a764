"""Perplexity of an artifact on a text: how well its engine predicts each token, in windows of equal length."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from llmc.runtime.llm import LLM
from llmc.runtime.params import SamplingParams


@dataclass(frozen=True)
class Perplexity:
    """value: exp of the mean of −ln p over `tokens` predicted tokens."""

    value: float
    tokens: int


def windows(tokens: Sequence[int], length: int, most: int | None) -> list[list[int]]:
    """`tokens` cut into windows of `length` (the last one may be shorter), `most` tokens in all; None: all of them."""
    kept = list(tokens if most is None else tokens[:most])
    cut = [kept[start : start + length] for start in range(0, len(kept), length)]
    return [window for window in cut if len(window) > 1]


def perplexity(
    artifact: Path,
    text: str,
    *,
    window: int,
    max_tokens: int | None = None,
    num_threads: int = 0,
    on_window: Callable[[int, int], None] = lambda done, total: None,
) -> Perplexity:
    """Predicts every token of `text` but the first of each window of `window` tokens from those before it.

    Each window starts with the model's BOS where its tokenizer adds one. Raises RequestError and the binding's errors.
    """
    with LLM(artifact, num_threads=num_threads, prefix_cache=False) as llm:
        first = llm.tokenizer.encode("")
        tokens = llm.tokenizer.encode(text, add_special_tokens=False)
        prompts = [first + part for part in windows(tokens, window - len(first), max_tokens)]
        params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
        outputs = llm.generate(prompts, params, progress=lambda done, total, _: on_window(done, total))
    values = [entry.logprob for output in outputs for entry in output.prompt_logprobs or ()]
    return Perplexity(math.exp(-math.fsum(values) / len(values)), len(values))
