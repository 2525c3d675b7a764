"""Reports of evaluations: perplexity, divergence from a reference, tasks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np

from llmc.runtime.report.charts import Curve, curves, error_bars, histogram
from llmc.runtime.report.page import Page, card, pair, section, tiles
from llmc.runtime.report.table import Column, Row, table
from llmc.runtime.report.words import NONE, number

if TYPE_CHECKING:
    from llmc.runtime.eval.divergence import Divergence
    from llmc.runtime.eval.perplexity import Perplexity
    from llmc.runtime.eval.run_tasks import Score

_POSITIONS = 32
_LEAST_KL = 1e-12


def perplexity_html(found: Perplexity, model: str, text: str) -> str:
    """The page of a measured perplexity. model, text: their names."""
    losses = np.array([loss for window in found.losses for loss in window])
    return Page(
        title="Perplexity",
        lead=f"{model} on {text}: {found.tokens:,} tokens predicted in {found.windows:,} windows of {found.window}.",
        parts=(
            tiles(
                (
                    (f"{found.perplexity:.4f}", "perplexity"),
                    (f"± {found.standard_error:.4f}", "standard error, as if tokens were independent"),
                    (f"{math.log(found.perplexity):.4f}", "nats a token"),
                    (f"{found.tokens_per_s:,.0f}", "tokens a second"),
                )
            ),
            section(
                "Tokens",
                pair(
                    card("−ln p of each token", histogram(losses, "−ln p of each token", "nats"), note=_beyond(losses)),
                    card(
                        "By place in the window",
                        curves(
                            "Perplexity by place in the window",
                            [_by_place(found.losses)],
                            "tokens before",
                            "perplexity",
                        ),
                        note="Tokens further on have more before them to go by.",
                    ),
                ),
            ),
            section("Windows", _windows(found.losses)),
        ),
        method="Made by llmc eval perplexity: every token but the first of a window is predicted from those before it.",
        data=found.as_dict(),
    ).html()


def _beyond(values: Any) -> str:
    return f"Largest: {number(float(values.max()))}" if values.size else ""


def _by_place(losses: Sequence[Sequence[float]]) -> Curve:
    """Perplexity of tokens by number of preceding tokens, in at most _POSITIONS intervals."""
    longest = max(map(len, losses), default=0)
    parts = min(_POSITIONS, longest)
    xs, ys = [], []
    for part in range(parts):
        first, last = part * longest // parts, (part + 1) * longest // parts
        here = [loss for window in losses for loss in window[first:last]]
        if here:
            xs.append((first + last + 1) / 2)
            ys.append(math.exp(math.fsum(here) / len(here)))
    return Curve("perplexity", xs, ys)


def _windows(losses: Sequence[Sequence[float]]) -> str:
    rows = (
        Row([f"{n}", f"{len(window):,}", f"{math.exp(math.fsum(window) / len(window)):.4f}", f"{max(window):.3f}"])
        for n, window in enumerate(losses)
        if window
    )
    columns = [Column(name) for name in ("window", "tokens", "perplexity", "largest −ln p")]
    return table("Windows, in the order of the text", columns, rows, tall=True)


def divergence_html(found: Divergence, artifact: str, reference: str, text: str) -> str:
    """The page of a measured divergence. artifact, reference, text: their names."""
    each = np.maximum(np.array(found.each), _LEAST_KL)
    rising = np.sort(each)
    shares = np.linspace(0, 1, min(len(rising), 400))
    quantiles = np.quantile(rising, shares) if len(rising) else np.zeros(0)
    return Page(
        title="Divergence from a reference",
        lead=f"{artifact} against {reference} on {text}: {found.tokens:,} predictions in {found.windows:,} windows of "
        f"{found.window}.",
        parts=(
            tiles(
                (
                    (f"{found.kl_mean:.6f}", "mean KL, nats a token"),
                    (f"± {found.standard_error:.6f}", "standard error, as if tokens were independent"),
                    (f"{found.kl_quantile_999:.6f}", "99.9 % quantile"),
                    (f"{found.kl_max:.6f}", "largest"),
                    (f"{found.top1_agreement:.2%}", "same likeliest token"),
                    (f"{found.perplexity:.4f}", f"perplexity, of the reference {found.reference_perplexity:.4f}"),
                )
            ),
            section(
                "Tokens",
                pair(
                    card(
                        "KL of each prediction, by its power of ten",
                        histogram(np.log10(each), "log10 of KL", "log10 of nats"),
                    ),
                    card(
                        "KL by quantile",
                        curves(
                            "KL by quantile of the predictions",
                            [Curve("KL", [*map(float, 100 * shares)], [*map(float, quantiles)])],
                            "percent of the predictions",
                            "nats",
                        ),
                    ),
                ),
            ),
        ),
        method="Made by llmc eval kl: KL(reference || artifact) over the whole vocabulary, of each token of the text.",
        data=found.as_dict(),
    ).html()


def tasks_html(scores: Sequence[Score], model: str) -> str:
    """The page of task scores. model: the artifact's name, or the server's address."""
    shares = [(f"{s.task}, {s.metric}", s.value, s.standard_error) for s in scores if 0 <= s.value <= 1]
    columns = [
        *(Column(name, words=True) for name in ("task", "metric", "filter")),
        Column("value"),
        Column("standard error"),
        Column("documents"),
    ]
    rows = (
        Row(
            [
                score.task,
                score.metric,
                score.filter,
                f"{score.value:.4f}",
                NONE if score.standard_error is None else f"{score.standard_error:.4f}",
                f"{score.samples:,}",
            ]
        )
        for score in scores
    )
    picture = f'<div class="card">{error_bars("Scores of tasks", shares)}</div>' if shares else ""
    return Page(
        title="Scores of tasks",
        lead=f"{model}: {len({score.task for score in scores})} tasks of lm-evaluation-harness.",
        parts=(
            section("Scores", picture, note="Whiskers are two standard errors to each side."),
            section("Figures", table("Scores, in the order of the harness", columns, rows, tall=True)),
        ),
        method="Made by llmc eval tasks.",
        data=[asdict(score) for score in scores],
    ).html()
