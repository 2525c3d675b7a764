"""Divergence of an artifact's predictions from another's, per token, over the whole vocabulary."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from llmc.runtime.binding import Artifact
from llmc.runtime.eval.lockstep import Lockstep
from llmc.runtime.eval.softmax import log_softmax
from llmc.runtime.eval.windows import mean_and_error, text_windows, window_length
from llmc.runtime.request_error import RequestError
from llmc.runtime.text.tokenizer import Tokenizer

Doubles = npt.NDArray[np.float64]
_TOGETHER = 32  # windows; a step's logits take a few times 32 × vocabulary × 8 bytes
_QUANTILE = 0.999


@dataclass(frozen=True)
class Divergence:
    """KL(reference ‖ artifact) in nats over `tokens` predictions. quantile_999: the 99.9 % quantile.

    top1_agreement: share of predictions with the same likeliest token. Perplexities: of the text's own tokens, for
    reference and artifact. standard_error: of the mean, assuming independent tokens. each: KL of every prediction.
    """

    kl_mean: float
    standard_error: float
    kl_max: float
    kl_quantile_999: float
    top1_agreement: float
    reference_perplexity: float
    perplexity: float
    tokens: int
    windows: int
    window: int
    seconds: float
    each: tuple[float, ...] = field(default=(), repr=False)

    def as_dict(self) -> dict[str, Any]:
        """The figures without per-token values."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "each"} | {
            "tokens_per_s": self.tokens_per_s
        }

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds if self.seconds > 0 else 0.0


def divergence(
    artifact: Path,
    reference: Path,
    text: str,
    *,
    window: int | None = None,
    max_tokens: int | None = None,
    num_threads: int = 0,
    on_step: Callable[[int, int], None] = lambda done, total: None,
) -> Divergence:
    """Compares two artifacts' predictions of `text`; they must share a vocabulary. Arguments: as for `perplexity`.

    Raises RequestError if their tokenizers differ, and the binding's errors.
    """
    length = window_length(window, min(_max_model_len(artifact), _max_model_len(reference)))
    found = text_windows(Tokenizer(artifact), text, length, max_tokens)
    if text_windows(Tokenizer(reference), text, length, max_tokens) != found:
        raise RequestError(
            f"{artifact} and {reference} read the text as different tokens; compare artifacts of a model"
        )
    start = time.perf_counter()
    with (
        Lockstep(reference, length, _TOGETHER, num_threads) as expected,
        Lockstep(artifact, length, _TOGETHER, num_threads) as compared,
    ):
        if expected.vocab_size != compared.vocab_size:
            raise RequestError(
                f"{reference} has a vocabulary of {expected.vocab_size} and {artifact} one of {compared.vocab_size}; "
                "compare artifacts of a model"
            )
        rows = _compare(expected, compared, found, on_step)
    seconds = time.perf_counter() - start
    kl, same, loss, reference_loss = np.concatenate(rows, axis=1)
    mean, error = mean_and_error(kl.tolist())
    return Divergence(
        kl_mean=mean,
        standard_error=error,
        kl_max=float(kl.max()),
        kl_quantile_999=float(np.quantile(kl, _QUANTILE)),
        top1_agreement=float(same.mean()),
        reference_perplexity=math.exp(float(reference_loss.mean())),
        perplexity=math.exp(float(loss.mean())),
        tokens=kl.size,
        windows=len(found),
        window=length,
        seconds=seconds,
        each=tuple(kl.tolist()),
    )


def _compare(
    expected: Lockstep, compared: Lockstep, found: Sequence[list[int]], on_step: Callable[[int, int], None]
) -> list[Doubles]:
    """One array [4, windows] per step: KL, whether the likeliest tokens agree, and −ln p of the text's token for
    both."""
    width = min(expected.width, compared.width)
    total, done = sum(len(window) - 1 for window in found), 0
    rows = []
    for first in range(0, len(found), width):
        # Longest first, so that finished windows are at the end.
        group = sorted(found[first : first + width], key=len, reverse=True)
        for position in range(len(group[0]) - 1):
            running = [window for window in group if len(window) > position + 1]
            tokens = [window[position] for window in running]
            p, q = (log_softmax(side.step(position, tokens)) for side in (expected, compared))
            follows = [window[position + 1] for window in running]
            each = np.arange(len(running))
            rows.append(
                np.stack([
                    (np.exp(p) * (p - q)).sum(axis=1),
                    (p.argmax(axis=1) == q.argmax(axis=1)).astype(np.float64),
                    -q[each, follows],
                    -p[each, follows],
                ])
            )  # fmt: skip
            done += len(running)
            on_step(done, total)
    return rows


def _max_model_len(path: Path) -> int:
    with Artifact(path) as artifact:
        return artifact.info.max_model_len
