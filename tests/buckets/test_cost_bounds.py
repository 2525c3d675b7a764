"""Intervals around predictions cover the truth at the stated rate, on synthetic machines whose truth is known."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from llmc.buckets.bucket import Bucket
from llmc.buckets.cost_bounds import CONFIDENCE, bounds
from llmc.buckets.cost_table import CostTable, ReplayCost
from llmc.buckets.step_cost import ROW_UNIT, StepCosts, computed_rows, num_pairs
from llmc.buckets.trace import Trace
from llmc.runtime.simulation.what_if import Ladder, Server, WhatIf

KEY = "ab" * 32
MACHINES = 20
PREFILL = [Bucket("prefill", batch, seq) for batch in (1, 2) for seq in (128, 256, 384, 512, 768, 1024, 1536, 2048)]
DECODE = [Bucket("decode", batch, seq) for batch in (1, 2, 4, 8, 16, 32) for seq in (256, 512, 1024, 2048)]
BETWEEN = [
    *(Bucket("prefill", batch, seq) for batch in (1, 2) for seq in (200, 320, 450, 640, 900, 1280, 1800)),
    *(Bucket("decode", batch, seq) for batch in (1, 3, 6, 12, 24) for seq in (384, 640, 896, 1500)),
]


def skipping(sequences: int, tokens: int, context: int, bucket: Bucket) -> float:
    """Seconds on a machine that skips padding: a roofline with a soft edge, which no curve of a few points has, and
    waves of a few per cent along the rows, as tiles make them."""
    rows = computed_rows(tokens, bucket.max_tokens, ROW_UNIT)
    compute, weights = rows * 8e-6, 1.2e-3
    wave = 1 + 0.03 * math.sin(rows / 37)
    edge: float = (weights**4 + compute**4) ** 0.25
    return (edge + 2e-10 * num_pairs(sequences, tokens, context)) * wave


def computing(sequences: int, tokens: int, context: int, bucket: Bucket) -> float:
    """Seconds on a machine that computes padding: what the full bucket takes."""
    full = bucket.max_tokens if bucket.phase != "decode" else bucket.batch
    return skipping(bucket.batch, full, bucket.seq, bucket)


Truth = Callable[[int, int, int, Bucket], float]


def loads(bucket: Bucket) -> set[tuple[int, int, int]]:
    """(sequences, tokens, context) of the loads that a warm-up measures."""
    if bucket.phase == "decode":
        return {(bucket.batch, bucket.batch, 1), (bucket.batch, bucket.batch, bucket.seq)}
    half = bucket.seq // 2
    full = (bucket.batch, bucket.max_tokens, bucket.seq)
    return {(bucket.batch, bucket.batch, 1), (bucket.batch, bucket.batch * half, half), full}


def measured(truth: Truth, seed: int, padding: str, noise: float = 0.06) -> StepCosts:
    """The costs that nine noisy repeats of each load give."""
    random = np.random.default_rng(seed)
    costs = []
    for bucket in (*PREFILL, *DECODE):
        for load in sorted(loads(bucket)):
            times = truth(*load, bucket) * np.exp(random.normal(0, noise, 9))
            costs.append(ReplayCost(bucket, *load, float(np.mean(times)), 9, float(np.std(times, ddof=1))))
    return StepCosts.of_table(CostTable({"p": "x"}, KEY, tuple(costs), padding), "measured")


@pytest.mark.parametrize(("truth", "padding"), [(skipping, "skipped"), (computing, "computed")])
def test_intervals_of_buckets_that_were_not_measured_cover_the_truth(truth: Truth, padding: str) -> None:
    inside, widths = [], []
    for seed in range(MACHINES):
        costs = measured(truth, seed, padding)
        for bucket in BETWEEN:
            low, high = costs.factors(bucket.phase)
            predicted = costs.seconds(bucket)
            true = truth(bucket.batch, bucket.max_tokens, bucket.seq, bucket)
            inside.append(predicted * low <= true <= predicted * high)
            widths.append(high / low)
    assert np.mean(inside) >= CONFIDENCE
    # They tell something: no more than a third up or down.
    assert np.median(widths) < 1.8


def test_intervals_of_a_simulated_trace_cover_the_truth() -> None:
    random = np.random.default_rng(7)
    arrivals = np.cumsum(random.exponential(0.05, 120))
    trace = Trace("made-up", arrivals, random.integers(20, 1800, 120), random.integers(2, 60, 120))
    ladder = Ladder("ladder", tuple(sorted((*PREFILL, *DECODE))))
    server = Server(2048, 32)
    exact = measured(skipping, 0, "skipped", noise=0.0)
    true = WhatIf(trace, server, StepCosts(exact.laws, None, 0.0, 0.0, "true")).run(ladder)
    assert true.low is None
    assert true.range_of(lambda o: o.seconds) is None
    inside = []
    for seed in range(10):
        outcome = WhatIf(trace, server, measured(skipping, seed, "skipped")).run(ladder)
        for value in (lambda o: o.seconds, lambda o: o.busy_s, lambda o: float(np.median(o.total_s))):
            ends = outcome.range_of(value)
            assert ends is not None
            assert ends[0] <= value(outcome) <= ends[1]
            inside.append(ends[0] <= value(true) <= ends[1])
    assert np.mean(inside) >= CONFIDENCE


def flat(phase: str, seq: int, seconds: float, disturbed: float = 0.0) -> ReplayCost:
    return ReplayCost(Bucket(phase, 1, seq), 1, seq if phase == "prefill" else 1, seq, seconds, 9, 0.0, disturbed)


def ones(known: object, asked: list[ReplayCost]) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    return np.ones(len(asked))


def test_few_buckets_tell_little() -> None:
    found = bounds([flat("decode", 64 * n, 1.0) for n in (1, 2, 3)], ones)  # type: ignore[arg-type]
    assert found["decode"] == pytest.approx((0.5, 2.0))
    # Four and more tell of their own, but so few not that the error is small.
    found = bounds([flat("decode", 64 * n, 1.0) for n in (1, 2, 3, 4)], ones)  # type: ignore[arg-type]
    assert found["decode"] == pytest.approx((1 / 1.25, 1.25))


def test_the_quantile_leaves_out_only_what_may_be_missed() -> None:
    costs = [flat("decode", n, 1.1) for n in range(1, 20)] + [flat("decode", 99, 3.0)]
    assert bounds(costs, ones)["decode"] == pytest.approx((1 / 1.1, 1.1))  # type: ignore[arg-type]
    costs += [flat("decode", 98, 3.0), flat("decode", 97, 3.0)]
    assert bounds(costs, ones)["decode"] == pytest.approx((1 / 3, 3))  # type: ignore[arg-type]


def test_what_others_took_may_be_missing_below() -> None:
    costs = [flat("decode", n, 1.1, disturbed=0.4 if n == 3 else 0.05) for n in range(1, 20)]
    low, high = bounds(costs, ones)["decode"]  # type: ignore[arg-type]
    assert low == pytest.approx(0.6 / 1.1)
    assert high == pytest.approx(1.1)


def test_low_and_high_costs_are_scaled_as_a_whole() -> None:
    costs = measured(skipping, 1, "skipped")
    low, high = costs.low(), costs.high()
    for bucket in (PREFILL[3], DECODE[5], Bucket("mixed", 4, 256)):
        ends = costs.factors(bucket.phase)
        assert low.seconds(bucket) == pytest.approx(ends[0] * costs.seconds(bucket))
        assert high.seconds(bucket) == pytest.approx(ends[1] * costs.seconds(bucket))
        for mine, theirs in zip(high.curves(bucket), costs.curves(bucket), strict=True):
            assert mine.at([1, 7, 64]) == pytest.approx(ends[1] * theirs.at([1, 7, 64]))
    assert not low.bounds
