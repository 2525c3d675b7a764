"""Decode buckets for a total of contexts, without an engine: specs, files, choice, costs, records, plans."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmc.buckets import Bucket, BucketError, Limits, parse_spec
from llmc.buckets.bucket import BucketLadder, area, check_total, select
from llmc.buckets.candidates import PhaseProblem
from llmc.buckets.cost import MeasuredCost, TokensCost, TotalCost
from llmc.buckets.cost_table import CostTable, ReplayCost
from llmc.buckets.demand import Demand, ServerModel
from llmc.buckets.evidence import Evidence
from llmc.buckets.files import write_file
from llmc.buckets.planner import Limits as PlanLimits
from llmc.buckets.planner import plan
from llmc.buckets.recorded_use import read_bucket_use
from llmc.buckets.replanning.proposal import Ladder, Policy, propose
from llmc.buckets.replanning.shapes import Limits as ReplanLimits
from llmc.buckets.replanning.shapes import ShapeUse, StepShape
from llmc.buckets.spec import format_spec
from llmc.buckets.trace import Trace
from llmc.buckets.verify_buckets import add_verify_buckets
from llmc.runtime.simulation.forms import in_totals

SERVER = Limits(max_num_seqs=8, max_model_len=2048, block_size=16)


def total(batch: int, seq: int) -> Bucket:
    return Bucket("decode", batch, seq, total=True)


@pytest.mark.parametrize(
    ("grid", "decode"),
    [
        ("8x[1024,4096]total", ["decode:8x1024total", "decode:8x4096total"]),
        ("8x[8,64]blktotal", ["decode:8x128total", "decode:8x1024total"]),
        # 8 sequences have no 64 tokens of 16 a block; two have at most 4,096.
        ("[2,8]x[64,8192]total", ["decode:2x64total", "decode:2x4096total", "decode:8x8192total"]),
        ("8x4096:4096:maxtotal", [f"decode:8x{size}total" for size in (4096, 8192, 12288, 16384)]),
        ("8x512+8x512total", ["decode:8x512", "decode:8x512total"]),
    ],
)
def test_specs(grid: str, decode: list[str], tmp_path: Path) -> None:
    ladder = parse_spec(f"prefill=1x128,decode={grid}", SERVER)
    assert [str(bucket) for bucket in ladder.decode] == decode
    assert [Bucket.parse(name) for name in decode] == list(ladder.decode)
    assert parse_spec(format_spec(ladder), SERVER) == ladder
    for suffix in (".toml", ".json"):
        write_file(tmp_path / f"ladder{suffix}", ladder)
        assert parse_spec(str(tmp_path / f"ladder{suffix}"), SERVER) == ladder


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("prefill=1x128total,decode=1x128", "prefill grid '1x128total' has a total that means nothing"),
        ("prefill=1x128,decode=1x128,mixed=2x64total", "mixed grid '2x64total' has a total that means nothing"),
        ("prefill=1x128,decode=8xtotal", "decode grid '8xtotal' has a total that means nothing"),
        ("prefill=1x128,decode=8x[16,64]total", "total context of 64 tokens has less than a block of 16 tokens a seq"),
    ],
)
def test_specs_that_mean_nothing(spec: str, says: str) -> None:
    with pytest.raises(BucketError, match=says.replace("[", r"\[")):
        parse_spec(spec, SERVER)


def test_buckets_that_mean_nothing() -> None:
    with pytest.raises(BucketError, match="bucket mixed:2x64total has a total context, which only decode buckets have"):
        Bucket("mixed", 2, 64, total=True)
    with pytest.raises(BucketError, match="decode:8x4total has 8 sequences but 4 tokens of context in all"):
        total(8, 4)
    check_total(total(8, 128), 16)
    with pytest.raises(BucketError, match="decode:8x120total has less than a block of 16 tokens for each"):
        check_total(total(8, 120), 16)


def test_the_scheduler_takes_the_smaller_table() -> None:
    buckets = [Bucket("decode", 8, 512), Bucket("decode", 8, 2048), total(8, 2048), total(8, 8192)]
    assert area(total(8, 2048)) == 2048
    # One of 1,900 tokens among short ones, then many long ones; without a total all count as the longest.
    assert select(buckets, 8, 1900, 2048) == total(8, 2048)
    assert select(buckets, 8, 1900, 7000) == total(8, 8192)
    assert select(buckets, 8, 1900) == Bucket("decode", 8, 2048)
    assert select(buckets, 8, 500, 4000) == Bucket("decode", 8, 512)
    # Of equal tables the one that a ladder has first.
    assert select(sorted([total(8, 4096), Bucket("decode", 8, 512)]), 2, 100, 200) == Bucket("decode", 8, 512)


def test_rows_for_guesses_in_the_forms_that_there_are() -> None:
    ladder = parse_spec("prefill=1x16,decode=[1,2]x64+2x[32,128]total", Limits(2, 64, 16))
    added = set(add_verify_buckets(ladder, 2, 3, 16).decode) - set(ladder.decode)
    # Eight rows might be eight sequences, of a block each.
    assert added == {Bucket("decode", 4, 64), Bucket("decode", 8, 64), total(4, 128), total(8, 128)}


def test_costs_of_a_total_are_those_of_its_share(tmp_path: Path) -> None:
    measured = MeasuredCost({Bucket("decode", 4, 100): 1.0, total(4, 800): 3.0, Bucket("decode", 4, 300): 5.0})
    assert measured.cost("decode", np.array([4]), np.array([200]))[0] == 3.0
    assert TotalCost(measured).cost("decode", np.array([4]), np.array([600]))[0] == 2.0
    assert TotalCost(TokensCost()).cost("decode", np.array([3]), np.array([100]))[0] == pytest.approx(100)
    costs = tuple(ReplayCost(bucket, 4, 4, 100, 1.0) for bucket in (Bucket("decode", 4, 400), total(4, 400)))
    table = CostTable({"threads": "1"}, "0" * 64, costs)
    table.write(tmp_path / "costs.json")
    assert CostTable.read(tmp_path / "costs.json").costs == costs


def test_what_a_server_recorded(tmp_path: Path) -> None:
    lines = [
        f'llmc_bucket_{name}_total{{phase="decode",batch="4",seq="{seq}"}} {value}'
        for seq in ("512", "512total")
        for name, value in (("replays", 2), ("tokens", 6), ("padding_tokens", 2), ("replay_seconds", 0.5))
    ]
    (tmp_path / "metrics.txt").write_text("# HELP of a server\n" + "\n".join(lines) + "\n")
    uses = read_bucket_use(tmp_path / "metrics.txt")
    assert [use.bucket for use in uses] == [Bucket("decode", 4, 512), total(4, 512)]


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(1, 40), st.integers(1, 9)), min_size=1, max_size=12))
def test_scores_are_those_of_the_choice(steps: list[tuple[int, int, int]]) -> None:
    """Tokens of tables, step by step, by brute force."""
    steps = [(batch, max(batch, blocks), weight) for batch, blocks, weight in steps]
    batch, seq, weight = (np.array(column) for column in zip(*steps, strict=True))
    demand = Demand("decode", batch, seq * 16, weight.astype(float), total=True)
    server = ServerModel(max_model_len=160, max_num_seqs=4)
    problem = PhaseProblem.of(demand, server, TokensCost(), 16)
    ladder = [total(2, 160), total(4, 256), total(4, 640)]
    outcome = problem.evaluate([(bucket.batch, bucket.seq) for bucket in ladder])
    chosen = [select(ladder, b, 0, 16 * s) for b, s, _ in steps]
    tables = sum(area(bucket) * w for bucket, (_, _, w) in zip(chosen, steps, strict=True) if bucket is not None)
    assert (outcome.tokens, outcome.held) == (tables, 1.0)
    assert outcome.cost == pytest.approx(tables)


def test_a_plan_of_totals() -> None:
    rng = np.random.default_rng(3)
    batch = rng.integers(1, 9, 300)
    blocks = np.maximum(batch, rng.integers(1, 300, 300))
    demand = Demand("decode", batch, blocks * 16, np.ones(300), total=True)
    trace = Trace("t", np.zeros(1), np.array([8]), np.array([8]))
    found = plan(
        trace, ServerModel(max_model_len=2048, max_num_seqs=8), PlanLimits(max_graphs=6), block_size=16,
        phases=("decode",), evidence={"decode": Evidence.of(demand)},
    )  # fmt: skip
    decode = found.ladder.decode
    assert len(decode) <= 6
    assert all(bucket.total for bucket in decode)
    for bucket in decode:
        check_total(bucket, 16)
    assert total(8, 8 * 2048) in decode
    # What is read is the sum of the chosen tables; a single bucket would read much more.
    chosen = [select(decode, int(b), 0, 16 * int(s)) for b, s in zip(batch, blocks, strict=True)]
    read = sum(area(bucket) for bucket in chosen if bucket is not None)
    assert found.phases[0].score.tokens == read < 1.2 * demand.tokens


def test_re_planning_adds_and_retires_totals() -> None:
    """One context of 256 tokens among seven of a block."""
    limits = ReplanLimits(max_model_len=256, max_num_seqs=8, block_size=16)
    prompt, longest = Bucket("prefill", 1, 256), Bucket("decode", 8, 256)
    uneven = StepShape("decode", 8, 8, 8, 256, 256 + 7 * 16)
    policy = Policy(least_steps=0, once_s=0, graph_s=0, least_share=0, unit="tokens", max_added=1)
    uses = [ShapeUse(uneven, longest, 5000.0, 0.01)]
    found = propose(uses, Ladder((prompt, longest), limits), policy)
    assert found.added == (total(8, 384),)
    assert (found.padding_now, found.padding_then) == (5000 * (8 * 256 - 368), 5000 * (384 - 368))
    # Where padding is skipped, a step takes the same time in both: nothing to gain.
    assert not propose(uses, Ladder((prompt, longest), limits), replace(policy, unit="time")).changes
    # A ladder of totals alone gets another one, and what that covers may go.
    ladder = Ladder((prompt, total(8, 8 * 256), total(8, 1024)), limits)
    more = propose([ShapeUse(uneven, total(8, 1024), 5000.0, 0.01)], ladder, replace(policy, max_graphs=3))
    assert (more.added, more.retired) == ((total(8, 384),), (total(8, 1024),))


replan_buckets = st.builds(
    lambda batch, blocks, whole: Bucket("decode", batch, 16 * (max(blocks, batch) if whole else blocks), whole),
    st.integers(1, 4), st.integers(1, 12), st.booleans(),
)  # fmt: skip


@given(replan_buckets, replan_buckets, st.lists(st.integers(1, 10), min_size=1, max_size=4))
def test_what_covers_holds_all_that_the_other_holds(one: Bucket, other: Bucket, blocks: list[int]) -> None:
    limits = ReplanLimits(max_model_len=160, max_num_seqs=4, block_size=16)
    count = len(blocks)
    shape = StepShape("decode", count, count, count, 16 * max(blocks), 16 * sum(blocks))
    assert limits.holds(other, shape) == (
        count <= other.batch
        and (16 * sum(blocks) if other.total else 16 * max(blocks)) <= other.seq
    )  # fmt: skip
    if limits.covers(one, other) and limits.holds(other, shape):
        assert limits.holds(one, shape)
    # What is missed runs in parts, which bring all sequences along.
    parts = limits.parts([one], shape)
    assert not parts or sum(part.sequences for part, _ in parts) == count


@given(
    st.lists(replan_buckets, min_size=1, max_size=5, unique=True),
    st.lists(st.lists(st.integers(1, 12), min_size=1, max_size=4), min_size=1, max_size=12),
)
def test_totals_of_as_large_tables_read_no_more(decode: list[Bucket], steps: list[list[int]]) -> None:
    """By brute force: a ladder for the longest context, and each of its buckets as a total."""
    longest = {Bucket("decode", one.batch, min(one.seq, 192)) for one in decode}
    ladder = BucketLadder((Bucket("prefill", 1, 64),), tuple(sorted({*longest, Bucket("decode", 4, 192)})))
    totals = in_totals(ladder, 16)
    assert all(bucket.total for bucket in totals.decode)
    assert len(totals.decode) <= len(ladder.decode)
    for blocks in steps:
        length, all_of = 16 * max(blocks), 16 * sum(blocks)
        before, after = (select(one.decode, len(blocks), length, all_of) for one in (ladder, totals))
        assert before is not None
        assert after is not None
        assert area(after, 16) <= area(before, 16)
