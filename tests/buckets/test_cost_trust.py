"""Which costs are not to be trusted: those that fall as buckets grow, and those measured under load."""

from __future__ import annotations

import pytest

from llmc.buckets.bucket import Bucket
from llmc.buckets.cost_table import DISTURBED, CostTable, CostTableError, ReplayCost
from llmc.buckets.cost_trust import MOST, TOLERANCE, doubtful, falls, refuse_falls, trusted
from llmc.runtime.warm_up import disturbance

KEY = "ab" * 32


def decode(batch: int, seq: int, seconds: float, *, deviation_s: float = 0.0, disturbed: float = 0.0) -> ReplayCost:
    return ReplayCost(Bucket("decode", batch, seq), batch, batch, seq, seconds, 9, deviation_s, disturbed)


def prefill(batch: int, seq: int, seconds: float) -> ReplayCost:
    return ReplayCost(Bucket("prefill", batch, seq), batch, batch * seq, seq, seconds, 9)


def table(*costs: ReplayCost) -> CostTable:
    return CostTable({"threads": "2"}, KEY, costs)


def test_both_sides_call_the_same_share_busy() -> None:
    assert disturbance.BUSY == DISTURBED


def test_costs_that_grow_do_not_fall() -> None:
    costs = [decode(b, s, 1e-3 * (b + s / 64)) for b in (1, 2, 4) for s in (64, 128)]
    assert falls([*costs, prefill(1, 128, 0.5)]) == []
    # A longer prompt in a smaller batch is neither larger nor smaller.
    assert falls([prefill(1, 256, 0.9), prefill(2, 128, 0.2)]) == []
    # Nor do the phases compare.
    assert falls([prefill(1, 64, 0.9), decode(1, 64, 0.1)]) == []


def test_a_fall_names_both_buckets_and_what_to_do() -> None:
    bad = table(decode(1, 64, 0.022), decode(2, 64, 0.0002), decode(4, 64, 0.0003))
    with pytest.raises(CostTableError) as caught:
        refuse_falls(bad, "here.json")
    said = str(caught.value)
    assert "decode:1x64 (1 x 1 tokens, context 64) took 22 ms and the larger decode:2x64" in said
    assert "took 0.2 ms" in said
    assert "llmc warmup --again" in said
    assert "here.json" in said
    assert {str(cost.bucket) for cost in doubtful(bad)} == {"decode:1x64", "decode:2x64"}


@pytest.mark.parametrize("grown", [decode(2, 64, 1.0), decode(1, 128, 1.0), decode(2, 128, 1.0)])
def test_a_fall_along_batch_or_length_counts(grown: ReplayCost) -> None:
    assert falls([decode(1, 64, TOLERANCE * 1.01), grown])
    assert not falls([decode(1, 64, TOLERANCE * 0.99), grown])


def test_a_light_load_takes_no_longer_than_a_full_one() -> None:
    bucket = Bucket("prefill", 2, 128)
    light, full = ReplayCost(bucket, 2, 2, 1, 0.9), ReplayCost(bucket, 2, 256, 128, 0.1)
    assert [(fall.less, fall.more) for fall in falls([light, full])] == [(light, full)]


def test_spread_explains_a_fall_up_to_a_bound() -> None:
    assert falls([decode(1, 64, 1.6), decode(2, 64, 1.0)])
    assert not falls([decode(1, 64, 1.6, deviation_s=0.4), decode(2, 64, 1.0, deviation_s=0.3)])
    assert falls([decode(1, 64, MOST * 1.01, deviation_s=9.0), decode(2, 64, 1.0, deviation_s=9.0)])


def test_costs_under_load_are_left_out_where_others_are_enough() -> None:
    clean = [decode(1, 64 * n, 1e-3 * n) for n in (1, 2, 3)]
    loaded = decode(1, 256, 9e-3, disturbed=0.4)
    kept, words = trusted([*clean, loaded])
    assert kept == tuple(clean)
    assert words.startswith("1 of 4 costs were measured while other programs took up to 40% of the machine")
    assert "left out" in words
    assert "llmc warmup" in words
    few = [clean[0], *(decode(1, 64 * n, 1e-3, disturbed=0.2) for n in (2, 3))]
    kept, words = trusted(few)
    assert kept == tuple(few)
    assert ", and are used:" in words
    assert trusted(clean) == (tuple(clean), "")
    assert doubtful(table(*clean, loaded)) == (loaded,)
