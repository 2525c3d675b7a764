"""The order of a warm-up: strategies, traffic, and which buckets are hot."""

from __future__ import annotations

import numpy as np
import pytest

from llmc.buckets.bucket import Bucket, BucketError
from llmc.buckets.demand import Demand
from llmc.buckets.trace import Trace
from llmc.buckets.usage import Usage, usage
from llmc.buckets.warm_order import HOT_SHARE, ladder_usage, parse_strategies, warm_order

PREFILL = [Bucket("prefill", b, s) for b in (1, 2) for s in (128, 256, 512)]
DECODE = [Bucket("decode", b, s) for b in (1, 4) for s in (256, 1024)]
ALL = [*PREFILL, *DECODE]
BASE = [ALL.index(Bucket("prefill", 2, 512)), ALL.index(Bucket("decode", 4, 1024))]


def names(order: tuple[int, ...]) -> list[str]:
    return [str(ALL[i]) for i in order]


def used(phase: str, buckets: list[Bucket], steps: dict[tuple[int, int], float]) -> Usage:
    shapes = np.array(list(steps), np.int64)
    return usage(Demand(phase, shapes[:, 0], shapes[:, 1], np.array(list(steps.values()))), buckets)


USED = {
    "prefill": used("prefill", PREFILL, {(1, 200): 80, (1, 100): 16, (2, 100): 4}),
    "decode": used("decode", DECODE, {(4, 1000): 96, (1, 1000): 4}),
}


@pytest.mark.parametrize("strategy", ["auto", "min_tokens", "max_bs"])
def test_every_bucket_comes_once_after_the_base(strategy: str) -> None:
    order, hot = warm_order(ALL, BASE, strategy)
    assert sorted(order) == list(range(len(ALL)))
    assert set(order[:hot]) == set(BASE)


def test_prompts_go_by_tokens_and_decode_by_batch() -> None:
    order, _ = warm_order(ALL, [], "auto")
    assert names(order) == [
        "prefill:1x128", "prefill:2x128", "prefill:1x256", "prefill:2x256", "prefill:1x512", "prefill:2x512",
        "decode:4x256", "decode:4x1024", "decode:1x256", "decode:1x1024",
    ]  # fmt: skip
    assert names(warm_order(ALL, [], "min_tokens")[0])[6:8] == ["decode:1x256", "decode:4x256"]
    assert names(warm_order(ALL, [], "max_bs")[0])[:3] == ["prefill:2x128", "prefill:2x256", "prefill:2x512"]


def test_traffic_decides_order_and_what_is_hot() -> None:
    order, hot = warm_order(ALL, BASE, "auto", USED)
    # 80 + 16 of 100 prefill steps are hot; the base serves 96 % of the decode steps.
    assert set(names(order[:hot])) == {"prefill:2x512", "decode:4x1024", "prefill:1x256", "prefill:1x128"}
    assert names(order)[hot : hot + 2] == ["prefill:2x128", "decode:1x1024"]
    assert sorted(order) == list(range(len(ALL)))


def test_hot_buckets_serve_most_of_each_phase() -> None:
    order, hot = warm_order(ALL, BASE, "traffic", USED)
    chosen = {ALL[i] for i in order[:hot]}
    for one in USED.values():
        assert sum(use.steps for use in one.uses if use.bucket in chosen) >= HOT_SHARE * one.steps


def test_usage_comes_from_a_trace() -> None:
    trace = Trace("t", np.zeros(3), np.array([100, 200, 200]), np.array([2, 2, 2]))
    found = ladder_usage(trace, ALL)
    steps = {use.bucket: use.steps for use in found["prefill"].uses if use.steps}
    assert sum(steps.values()) == found["prefill"].steps > 0
    assert set(found) == {"prefill", "decode"}
    with pytest.raises(BucketError, match="needs prefill and decode"):
        ladder_usage(trace, PREFILL)


def test_usage_of_totals_counts_contexts_as_they_are() -> None:
    """Contexts of 1,000, 20 and 20 tokens: about 1,040 together, and 3,000 as a rectangle. The first prompt decodes
    while the others wait."""
    trace = Trace("t", np.zeros(3), np.array([1000, 20, 20]), np.array([5, 5, 5]))
    totals = [Bucket("decode", 4, 1100, total=True), Bucket("decode", 4, 4096, total=True)]
    found = ladder_usage(trace, [Bucket("prefill", 1, 1024), *totals])["decode"]
    assert [(use.steps, found.missed) for use in found.uses] == [(6, 0), (0, 0)]
    read = 1001 + (1002 + 21) + (1003 + 22 + 21) + (1004 + 23 + 22) + (24 + 23) + 24
    assert found.uses[0].padding == pytest.approx(1 - read / (6 * 1100))
    alike = usage(Demand("decode", np.array([3]), np.array([1000]), np.ones(1)), totals)
    assert [use.steps for use in alike.uses] == [0, 1]


def test_bad_strategies() -> None:
    with pytest.raises(BucketError, match="order 'best' is unknown"):
        warm_order(ALL, BASE, "best")
    with pytest.raises(BucketError, match="traffic needs a trace"):
        warm_order(ALL, BASE, "traffic")


def test_each_phase_may_have_a_strategy_of_its_own() -> None:
    assert parse_strategies("max_bs") == dict.fromkeys(("prefill", "decode", "mixed"), "max_bs")
    assert parse_strategies("decode=min_tokens") == {"prefill": "auto", "decode": "min_tokens", "mixed": "auto"}
    order, hot = warm_order(ALL, BASE, "prefill=max_bs, decode=min_tokens")
    assert set(names(order)[:hot]) == {"prefill:2x512", "decode:4x1024"}
    assert names(order)[hot : hot + 2] == ["prefill:2x128", "prefill:2x256"]
    assert names(order)[-3:] == ["decode:1x256", "decode:4x256", "decode:1x1024"]
    # Traffic decides for one phase alone.
    order, hot = warm_order(ALL, BASE, "prefill=traffic,decode=max_bs", USED)
    assert set(names(order[:hot])) == {"prefill:2x512", "decode:4x1024", "prefill:1x256", "prefill:1x128"}
    assert names(order)[-3:] == ["decode:4x256", "decode:1x256", "decode:1x1024"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("decoding=max_bs", "names the phase 'decoding'"),
        ("decode=best", "order 'best' is unknown"),
        ("decode=max_bs,decode=auto", "names decode twice"),
        ("prefill=max_bs,", "names the phase ''"),
        ("", "order '' is unknown"),
    ],
)
def test_bad_strategies_of_phases(text: str, says: str) -> None:
    with pytest.raises(BucketError, match=says):
        parse_strategies(text)


def test_traffic_for_one_phase_needs_a_trace() -> None:
    with pytest.raises(BucketError, match="traffic needs a trace"):
        warm_order(ALL, BASE, "decode=traffic")
