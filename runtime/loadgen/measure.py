"""The figures of a run, computed from its requests' outcomes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from .answer import Outcome

PERCENTILES = (50, 90, 95, 99)
GOODPUT_METRICS = ("ttft", "tpot", "e2e")


@dataclass(frozen=True)
class Spread:
    """Statistics of some values: percentiles are interpolated linearly; std is the population's."""

    count: int
    mean: float
    std: float
    min: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread | None:
        """None without values."""
        array = np.fromiter(values, np.float64)
        if not array.size:
            return None
        p50, p90, p95, p99 = np.percentile(array, PERCENTILES).tolist()
        low, high = float(array.min()), float(array.max())
        return cls(array.size, float(array.mean()), float(array.std()), low, p50, p90, p95, p99, high)


@dataclass(frozen=True)
class Report:
    """The figures of a run. Rates are per second of duration_s, from the first request sent to the last one's end.
    Tokens and latencies are those of completed requests.

    itl_ms: time between two events of a stream. lag_ms: delay of sending against schedule. goodput: completed requests
    per second that met all limits; None without limits. failures: requests by cause. examples: one sentence per cause.
    tokens_counted: requests without usage, whose events were counted instead.
    """

    requests: int
    completed: int
    failed: int
    failures: dict[str, int]
    examples: dict[str, str]
    duration_s: float
    input_tokens: int
    cached_tokens: int
    output_tokens: int
    tokens_counted: int
    requests_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    peak_output_tokens_per_s: float
    peak_concurrency: int
    goodput_limits_ms: dict[str, float]
    goodput: float | None
    ttft_ms: Spread | None
    tpot_ms: Spread | None
    itl_ms: Spread | None
    e2e_ms: Spread | None
    lag_ms: Spread | None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def report(outcomes: Sequence[Outcome], goodput_limits_ms: Mapping[str, float] | None = None) -> Report:
    """Summarizes a run. goodput_limits_ms: by name in GOODPUT_METRICS."""
    limits = dict(goodput_limits_ms or {})
    done = [outcome for outcome in outcomes if outcome.ok]
    bad = [outcome for outcome in outcomes if outcome.failure is not None]
    examples: dict[str, str] = {}
    for outcome in bad:
        examples.setdefault(outcome.failure or "", outcome.detail)
    duration = max((o.end_ns for o in outcomes), default=0) - min((o.start_ns for o in outcomes), default=0)
    duration_s = max(duration / 1e9, 1e-9)
    input_tokens, output_tokens = sum(o.prompt_tokens for o in done), sum(o.output_tokens for o in done)
    good = sum(all(_met(o, name, limit) for name, limit in limits.items()) for o in done)
    return Report(
        requests=len(outcomes),
        completed=len(done),
        failed=len(bad),
        failures=dict(Counter(o.failure or "" for o in bad).most_common()),
        examples=examples,
        duration_s=duration_s,
        input_tokens=input_tokens,
        cached_tokens=sum(o.cached_tokens for o in done),
        output_tokens=output_tokens,
        tokens_counted=sum(not o.has_usage for o in done),
        requests_per_s=len(done) / duration_s,
        output_tokens_per_s=output_tokens / duration_s,
        total_tokens_per_s=(input_tokens + output_tokens) / duration_s,
        peak_output_tokens_per_s=_peak_rate(done),
        peak_concurrency=peak_concurrency(outcomes),
        goodput_limits_ms=limits,
        goodput=good / duration_s if limits else None,
        ttft_ms=Spread.of(o.ttft_ms for o in done if o.ttft_ms is not None),
        tpot_ms=Spread.of(o.tpot_ms for o in done if o.tpot_ms is not None),
        itl_ms=Spread.of((b - a) / 1e6 for o in done for a, b in zip(o.token_ns, o.token_ns[1:], strict=False)),
        e2e_ms=Spread.of(o.e2e_ms for o in done if o.e2e_ms is not None),
        lag_ms=Spread.of(max(0, o.start_ns - o.due_ns) / 1e6 for o in outcomes),
    )


def peak_concurrency(outcomes: Iterable[Outcome]) -> int:
    """The maximum number of concurrent requests."""
    # An end counts before a start at the same time.
    changes = sorted(change for o in outcomes for change in ((o.start_ns, 1), (o.end_ns, -1)))
    running = peak = 0
    for _, change in changes:
        running += change
        peak = max(peak, running)
    return peak


def _met(outcome: Outcome, name: str, limit: float) -> bool:
    value = {"ttft": outcome.ttft_ms, "tpot": outcome.tpot_ms, "e2e": outcome.e2e_ms}[name]
    # A single token has no inter-token time to exceed a limit.
    return value is None or value <= limit


def _peak_rate(done: Sequence[Outcome]) -> float:
    """Most output tokens in one whole second, counted from the first request."""
    if not done:
        return 0.0
    start = min(o.start_ns for o in done)
    seconds = np.array([(t - start) // 1_000_000_000 for o in done for t in o.token_ns], np.int64)
    # Several tokens may come in one event.
    weights = np.array([o.output_tokens / len(o.token_ns) for o in done for _ in o.token_ns])
    return float(np.bincount(seconds, weights).max()) if seconds.size else 0.0
