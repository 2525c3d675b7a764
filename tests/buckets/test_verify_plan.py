"""Buckets with rows for guesses, planned on made-up machines."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmc.buckets import Bucket, BucketError
from llmc.buckets.cost import BucketCost, Floats, Ints, Lengths
from llmc.buckets.demand import Demand
from llmc.buckets.verify_plan import LEAST_SAVING, plan_verify

BLOCK = 16


class Machine(BucketCost):
    """A step takes 1 to read weights, `row` for each row of its bucket and `key` for each token of their contexts."""

    unit = "steps"

    def __init__(self, row: float, key: float) -> None:
        self.row, self.key = row, key

    def cost(self, phase: str, batch: Ints, seq: Lengths) -> Floats:
        return np.asarray(1 + batch * (self.row + self.key * seq), np.float64)


def brute(demand: Demand, buckets: list[Bucket], machine: Machine, guesses: int, odds: float) -> float:
    """Step by step, bucket by bucket, depth by depth."""
    total = 0.0
    for n, s, weight in zip(demand.batch.tolist(), demand.seq.tolist(), demand.weight.tolist(), strict=True):
        each = [
            (1 + bucket.batch * (machine.row + machine.key * bucket.seq)) / sum(odds**i for i in range(depth + 1))
            for bucket in buckets
            for depth in range(guesses + 1)
            if n * (depth + 1) <= bucket.batch and s <= bucket.seq
        ]
        total += weight * min(each)
    return total


steps = st.lists(st.tuples(st.integers(1, 2), st.integers(1, 64), st.integers(1, 9)), min_size=1, max_size=6)


@settings(max_examples=60, deadline=None)
@given(steps, st.floats(0.0, 0.6), st.floats(0, 0.01), st.floats(0.05, 0.95), st.integers(1, 3), st.integers(0, 3))
def test_it_is_near_what_brute_force_finds(
    shapes: list[tuple[int, int, int]], row: float, key: float, odds: float, guesses: int, most: int
) -> None:
    batch, seq, weight = np.array(shapes, np.int64).T
    demand = Demand("decode", batch, seq, weight.astype(np.float64))
    machine = Machine(row, key)
    ladder = [Bucket("decode", b, s) for b in (1, 2) for s in (32, 64)]
    plan = plan_verify(
        *(demand, ladder, machine),
        guesses=guesses,
        odds=odds,
        max_num_seqs=2,
        block_size=BLOCK,
        most=most,
    )
    assert len(plan.buckets) <= most
    assert plan.plain == pytest.approx(brute(demand, ladder, machine, 0, odds))
    assert plan.spare == pytest.approx(brute(demand, ladder, machine, guesses, odds))
    assert plan.cost == pytest.approx(brute(demand, [*ladder, *plan.buckets], machine, guesses, odds))
    assert plan.bound - 1e-9 <= plan.cost <= plan.spare + 1e-9 <= plan.plain + 2e-9
    rows = sorted({2, 4, 2 * (guesses + 1)} - {1, 2})
    others = [Bucket("decode", b, s) for b in rows for s in (32, 64) if b <= 2 * (guesses + 1)]
    best = min(
        brute(demand, [*ladder, *chosen], machine, guesses, odds)
        for count in range(min(most, len(others)) + 1)
        for chosen in itertools.combinations(others, count)
    )
    # What is left out saves little, each.
    assert plan.cost <= best + (most + 1) * LEAST_SAVING * plan.plain + 1e-9


@settings(max_examples=40, deadline=None)
@given(steps, st.floats(0.0, 0.6), st.floats(0, 0.01), st.floats(0.05, 0.95), st.integers(1, 3))
def test_totals_of_contexts(
    shapes: list[tuple[int, int, int]], row: float, key: float, odds: float, guesses: int
) -> None:
    """As above, for buckets and steps that are counted by the total of contexts."""
    shapes = [(n, max(s, n * BLOCK), weight) for n, s, weight in shapes]
    batch, seq, weight = np.array(shapes, np.int64).T
    demand = Demand("decode", batch, seq, weight.astype(np.float64), total=True)
    machine = Machine(row, key)
    ladder = [Bucket("decode", b, s, total=True) for b in (1, 2) for s in (64, 128)]
    plan = plan_verify(demand, ladder, machine, guesses=guesses, odds=odds, max_num_seqs=2, block_size=BLOCK)

    def cost(buckets: list[Bucket], depths: int) -> float:
        return sum(
            w * min(
                (1 + b.batch * row + key * b.seq) / sum(odds**i for i in range(depth + 1))
                for b in buckets
                for depth in range(depths + 1)
                if n * (depth + 1) <= b.batch and -(-s // BLOCK) * BLOCK <= b.seq
            )
            for n, s, w in shapes
        )  # fmt: skip

    assert all(bucket.total and bucket.seq >= bucket.batch * BLOCK for bucket in plan.buckets)
    assert plan.plain == pytest.approx(cost(ladder, 0))
    assert plan.spare == pytest.approx(cost(ladder, guesses))
    assert plan.cost == pytest.approx(cost([*ladder, *plan.buckets], guesses))


def test_free_rows_are_taken_and_dear_ones_are_not() -> None:
    demand = Demand("decode", np.array([4]), np.array([50]), np.array([100.0]))
    ladder = [Bucket("decode", 4, 64)]
    options: dict[str, Any] = {"guesses": 7, "odds": 0.8, "max_num_seqs": 4, "block_size": BLOCK}
    cheap = plan_verify(demand, ladder, Machine(0.0, 0.0), **options)
    assert [str(bucket) for bucket in cheap.buckets] == ["decode:32x64"]
    assert cheap.plain / cheap.cost == pytest.approx(sum(0.8**i for i in range(8)))
    dear = plan_verify(demand, ladder, Machine(1.0, 0.0), **options)
    assert (dear.buckets, dear.cost) == ((), dear.plain)


def test_what_is_out_of_range() -> None:
    demand = Demand("decode", np.array([1]), np.array([5]), np.array([1.0]))
    ladder = [Bucket("decode", 1, 64)]
    for guesses, odds, said in ((0, 0.5, "speculate 0"), (65, 0.5, "speculate 65"), (3, 1.0, "acceptance 1")):
        with pytest.raises(BucketError, match=f"{said} is out of range: use"):
            plan_verify(demand, ladder, Machine(0, 0), guesses=guesses, odds=odds, max_num_seqs=1, block_size=BLOCK)
