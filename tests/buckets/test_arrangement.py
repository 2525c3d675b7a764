"""Ranks, stages and replicas: what messages between them take, and costs among them."""

from __future__ import annotations

import math
import random
import re

import numpy as np
import pytest

from llmc.buckets.arrangement import Arrangement, DividedModel, Link
from llmc.buckets.bucket import Bucket, BucketError
from llmc.buckets.cost import FlopsCost, ModelShape
from llmc.buckets.cost_table import CostTable, ReplayCost
from llmc.buckets.step_cost import StepCosts

SHAPE = ModelShape(hidden=96, intermediate=480, layers=5, heads=12, kv_heads=4, head_dim=8, vocab=1200)
LINK = Link(latency_s=7e-6, message_s=1e-6, bytes_per_s=3e9)


def sum_s(floats: int, ranks: int) -> float:
    """One message after another, as the ranks pass them."""
    if ranks == 1:
        return 0.0
    size, rounds = 4 * floats / LINK.bytes_per_s, math.ceil(math.log2(ranks))
    if ranks == 2 or floats < 8192:
        return rounds * LINK.latency_s + (ranks - 1) * size
    spread = LINK.latency_s + (ranks - 2) * LINK.message_s + (ranks - 1) * size / ranks
    around = ranks - 1 if 4 * floats > 512 << 10 else rounds
    return spread + around * LINK.latency_s + (ranks - 1) * size / ranks


def messages_s(arrangement: Arrangement, rows: int, sequences: int) -> float:
    ranks, stages = arrangement.ranks, arrangement.stages
    seconds = 0.0
    for _ in range(2 * SHAPE.layers + 1):
        seconds += sum_s(rows * SHAPE.hidden, ranks)
    if ranks > 1:
        logits = sequences * SHAPE.vocab // ranks
        seconds += math.ceil(math.log2(ranks)) * LINK.latency_s + (ranks - 1) * 4 * logits / LINK.bytes_per_s
    if stages > 1:
        seconds += (stages - 1) * (LINK.latency_s + 4 * rows * SHAPE.hidden / LINK.bytes_per_s)
        seconds += LINK.latency_s + 4 * sequences * SHAPE.vocab / LINK.bytes_per_s
    if stages > 1:
        return seconds + LINK.latency_s + (ranks * stages - 2) * LINK.message_s
    return seconds + math.ceil(math.log2(ranks)) * LINK.latency_s


ARRANGEMENTS = [Arrangement(*numbers) for numbers in ((1,), (2,), (4,), (1, 5), (2, 3, 7), (4, 2))]


def test_messages_are_those_that_the_ranks_pass() -> None:
    rng = random.Random(1)
    for arrangement in ARRANGEMENTS:
        model = DividedModel(SHAPE, arrangement, LINK)
        for _ in range(50):
            rows = rng.choice((1, 85, 86, 1365, 1366, rng.randrange(1, 4000)))
            sequences = rng.randrange(1, rows + 1)
            assert float(model.messages_s(rows, sequences)) == pytest.approx(messages_s(arrangement, rows, sequences))


def table() -> CostTable:
    """Padding is skipped; seconds by a rule."""
    loads = []
    for bucket in (Bucket("prefill", 1, n) for n in (1, 64, 512, 4096)):
        loads.append(ReplayCost(bucket, 1, bucket.seq, bucket.seq, 1e-3 + 4e-6 * bucket.seq))
    for batch in (1, 8, 64):
        loads.append(ReplayCost(Bucket("decode", batch, 1024), batch, batch, 1024, 1e-3 + 2e-5 * batch))
    return CostTable({"processor": "x"}, "0" * 64, tuple(loads), padding="skipped")


@pytest.mark.parametrize("arrangement", ARRANGEMENTS, ids=str)
def test_costs_are_a_share_and_the_messages(arrangement: Arrangement) -> None:
    """For measured costs at every number of rows, and for costs by a rule."""
    model = DividedModel(SHAPE, arrangement, LINK, undivided_s=1e-4)
    whole = StepCosts.of_table(table(), "a table")
    mine = model.costs(whole)
    assert not mine.bounds
    for phase in ("prefill", "decode"):
        before, after = whole.laws[phase], mine.laws[phase]
        rows = np.arange(1, 4097, dtype=np.float64)
        wanted = 1e-4 + (before.at(rows) - 1e-4) / arrangement.ranks
        wanted += [messages_s(arrangement, int(n), 0) for n in rows]
        np.testing.assert_allclose(after.at(rows), wanted, rtol=1e-9)
        assert after.of_pair(phase) == pytest.approx(before.of_pair(phase) / arrangement.ranks)
        each = messages_s(arrangement, 9, 1) - messages_s(arrangement, 9, 0)
        assert after.sequence_s == pytest.approx(before.sequence_s / arrangement.ranks + each)
    roofline = FlopsCost(SHAPE, 1e10, 1e8, 1e-4)
    by_rule = model.costs(StepCosts.of_model(roofline, "a roofline"))
    for phase, batch, seq in (("prefill", 2, 512), ("decode", 16, 1024)):
        shape = np.array([batch]), np.array([seq])
        one = float(roofline.cost(phase, *shape)[0])
        rows_of = batch if phase == "decode" else batch * seq
        wanted_s = 1e-4 + (one - 1e-4) / arrangement.ranks + messages_s(arrangement, rows_of, batch)
        assert float(by_rule.cost(phase, *shape)[0]) == pytest.approx(wanted_s)


def test_arrangements_are_read_and_refused() -> None:
    assert Arrangement.parse("8") == Arrangement(8, 1, 1)
    assert Arrangement.parse("8x4") == Arrangement(8, 4, 1)
    assert str(Arrangement.parse("2x3x5")) == "2x3x5"
    assert Arrangement.parse("2x3x5").processes == 30
    for text in ("", "x", "8x", "8x4x2x1", "-1", "²", "0", "1x0", "1x1x0", "257", "64x5", "1x1x5000", "9999999"):
        with pytest.raises(BucketError, match=re.escape(text) if text else "ranks x stages"):
            Arrangement.parse(text)


@pytest.mark.parametrize(
    ("arrangement", "words"),
    [
        (Arrangement(5), "12 attention heads cannot be divided among 5 ranks"),
        (Arrangement(12), "4 KV heads"),
        (Arrangement(1, 6), "more stages than the model's 5 layers"),
    ],
)
def test_what_cannot_be_divided_is_refused(arrangement: Arrangement, words: str) -> None:
    with pytest.raises(BucketError, match=re.escape(words)):
        DividedModel(SHAPE, arrangement, LINK).check()
