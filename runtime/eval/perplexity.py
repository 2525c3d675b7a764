"""Perplexity of an artifact on a text, in windows of equal length."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from llmc.runtime.eval.windows import mean_and_error, text_windows, window_length
from llmc.runtime.llm import LLM
from llmc.runtime.params import SamplingParams
from llmc.runtime.request_error import RequestError


@dataclass(frozen=True)
class Perplexity:
    """perplexity: exp of the mean of −ln p over `tokens` predicted tokens. standard_error: of it, assuming independent
    tokens. window: most tokens of a window. seconds: of scoring. losses: −ln p of each predicted token, one tuple per
    window."""

    perplexity: float
    standard_error: float
    tokens: int
    windows: int
    window: int
    seconds: float
    losses: tuple[tuple[float, ...], ...] = field(default=(), repr=False)

    def as_dict(self) -> dict[str, Any]:
        """The figures without per-token values."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "losses"} | {
            "tokens_per_s": self.tokens_per_s
        }

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds if self.seconds > 0 else 0.0


def perplexity(
    artifact: Path,
    text: str,
    *,
    window: int | None = None,
    max_tokens: int | None = None,
    num_threads: int = 0,
    on_window: Callable[[int, int], None] = lambda done, total: None,
) -> Perplexity:
    """Predicts every token of `text` from earlier tokens in its window, except the first of each window.

    window: None for 512, or the artifact's limit. If the tokenizer adds a BOS, each window starts with it, and every
    token of the text is predicted. Raises RequestError and the binding's errors.
    """
    with LLM(artifact, num_threads=num_threads, prefix_cache=False) as llm:
        length = window_length(window, llm.limit.tokens)
        prompts = text_windows(llm.tokenizer, text, length, max_tokens)
        params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
        start = time.perf_counter()
        outputs = llm.generate(prompts, params, progress=lambda done, total, _: on_window(done, total))
        seconds = time.perf_counter() - start
    for output in outputs:
        if output.error is not None:
            raise RequestError(output.error.message)
    losses = tuple(tuple(-entry.logprob for entry in output.prompt_logprobs or ()) for output in outputs)
    every = [loss for window in losses for loss in window]
    mean, error = mean_and_error(every)
    value = math.exp(mean)
    return Perplexity(value, value * error, len(every), len(prompts), length, seconds, losses)
