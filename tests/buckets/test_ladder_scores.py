"""What ladders are said to pad: the planner and the simulation against a scorer that takes a step at a time."""

from __future__ import annotations

import re
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmc.buckets import Bucket
from llmc.buckets.bucket import REQUIRED_PHASES
from llmc.buckets.candidates import PhaseProblem
from llmc.buckets.cost import TokensCost
from llmc.buckets.demand import Demand, ServerModel, demands
from llmc.buckets.planner import Limits, plan, score
from llmc.buckets.step_cost import AssumedCost, StepCosts
from llmc.buckets.trace import Trace, read_trace
from llmc.runtime.simulation.what_if import Ladder, Server, WhatIf

from support.ladder_scorer import Scored, scored
from support.paths import ROOT
from support.traces import PUBLISHED, TRACES

DOCS = ROOT / "docs" / "buckets.md"
LONGEST, MOST = 200, 5

shapes = st.lists(st.tuples(st.integers(1, MOST), st.integers(1, LONGEST), st.integers(1, 4)), min_size=1, max_size=30)
any_sizes = st.sets(st.tuples(st.integers(1, MOST), st.integers(1, LONGEST)), max_size=8)


def demand_of(phase: str, steps: list[tuple[int, int, int]]) -> Demand:
    batch, seq, weight = (np.array(column) for column in zip(*steps, strict=True))
    return Demand(phase, batch, seq, weight.astype(float))


def steps_of(demand: Demand) -> list[tuple[int, int, int]]:
    columns = (demand.batch.tolist(), demand.seq.tolist(), np.round(demand.weight).astype(int).tolist())
    return list(zip(*columns, strict=True))


@pytest.mark.parametrize("phase", REQUIRED_PHASES)
@given(steps=shapes, ladder=any_sizes, block_size=st.sampled_from([1, 16, 32, 60]))
@settings(deadline=None)
def test_a_ladder_of_any_sizes_is_scored_by_true_lengths(
    phase: str, steps: list[tuple[int, int, int]], ladder: set[tuple[int, int]], block_size: int
) -> None:
    server = ServerModel(LONGEST, MOST, MOST, LONGEST * MOST)
    problem = PhaseProblem.of(demand_of(phase, steps), server, TokensCost(), block_size)
    base = (MOST, LONGEST) if phase == "decode" else (1, LONGEST)
    truth = scored(phase, steps, sorted(ladder | {base}), block_size)
    found = score("any", problem, sorted(ladder))
    assert found.tokens == pytest.approx(truth.computed)
    assert found.cost == pytest.approx(truth.computed)
    assert found.padding == pytest.approx(truth.padding)
    assert found.held == pytest.approx(1 - truth.missed / sum(count for *_, count in steps))


def test_a_prompt_of_340_tokens_runs_in_the_bucket_of_342() -> None:
    problem = PhaseProblem.of(demand_of("prefill", [(1, 340, 1)]), ServerModel(4096), TokensCost(), 32)
    assert problem.evaluate([(1, 171), (1, 342), (1, 513)]).tokens == 342
    # A decode graph of 342 tokens has eleven blocks, 352 tokens: it reads them all, and holds as many.
    for length, computed in ((340, 352), (350, 352), (353, 544)):
        problem = PhaseProblem.of(demand_of("decode", [(1, length, 1)]), ServerModel(4096), TokensCost(), 32)
        assert problem.evaluate([(1, 342), (1, 513)]).tokens == computed


@pytest.mark.parametrize("block_size", [16, 100])
def test_every_ladder_of_a_plan_is_scored_as_it_serves(block_size: int) -> None:
    rng = np.random.default_rng(5)
    trace = Trace("x", np.cumsum(rng.exponential(0.3, 200)), rng.integers(1, 900, 200), rng.integers(1, 60, 200))
    server = ServerModel(1000, 6)
    asked = demands(trace, server, REQUIRED_PHASES)
    for phase in plan(trace, server, Limits(max_graphs=9), block_size=block_size).phases:
        for ladder in (phase.score, *phase.others):
            truth = scored(phase.phase, steps_of(asked[phase.phase]), list(ladder.pairs), block_size)
            assert ladder.padding == pytest.approx(truth.padding), ladder.name


def simulated(trace: Trace, ladder: dict[str, list[tuple[int, int]]], block_size: int) -> dict[str, float]:
    """Padded tokens by phase, in the simulation."""
    buckets = tuple(sorted(Bucket(phase, *pair) for phase in ladder for pair in ladder[phase]))
    server = Server(LONGEST, MOST, block_size, prefix_cache=False)
    one = WhatIf(trace, server, StepCosts.of_model(AssumedCost(), "assumed")).run(Ladder("any", buckets))
    return {phase: one.padded_tokens(phase) for phase in ladder}


@given(
    decode=any_sizes,
    prefill=st.sets(st.integers(1, LONGEST), max_size=5),
    requests=st.lists(st.tuples(st.integers(1, LONGEST - 1), st.integers(1, 30)), min_size=1, max_size=8),
    block_size=st.sampled_from([16, 32]),
)
@settings(max_examples=40, deadline=None)
def test_the_simulation_pads_what_the_steps_of_single_requests_tell(
    decode: set[tuple[int, int]], prefill: set[int], requests: list[tuple[int, int]], block_size: int
) -> None:
    """Requests so far apart that each is alone: a prompt, then contexts of one token more each."""
    ladder = {"decode": sorted(decode | {(MOST, LONGEST)}), "prefill": [(1, n) for n in sorted(prefill | {LONGEST})]}
    prompts, outputs = (np.array(column) for column in zip(*requests, strict=True))
    padded = simulated(
        Trace("x", np.arange(len(requests), dtype=np.float64) * 1e4, prompts, outputs), ladder, block_size
    )
    steps: dict[str, Counter[int]] = {"prefill": Counter(), "decode": Counter()}
    for prompt, output in requests:
        steps["prefill"][prompt] += 1
        steps["decode"].update(range(prompt + 1, min(prompt + output, LONGEST)))
    for phase, counted in steps.items():
        truth = scored(phase, [(1, length, n) for length, n in counted.items()], ladder[phase], block_size)
        assert padded[phase] == truth.computed - truth.asked


def test_the_simulation_pads_what_its_batches_tell() -> None:
    """Requests that run together: by what each load says of its replays, in buckets that the scorer chooses."""
    rng = np.random.default_rng(2)
    trace = Trace("x", np.cumsum(rng.exponential(0.1, 60)), rng.integers(1, 150, 60), rng.integers(1, 50, 60))
    pairs = [(1, 70), (1, 150), (2, 131), (4, 90), (5, 99), (MOST, LONGEST)]
    buckets = (*(Bucket("decode", *pair) for pair in sorted(pairs)), Bucket("prefill", 1, LONGEST))
    server = Server(LONGEST, MOST, 16, prefix_cache=False)
    one = WhatIf(trace, server, StepCosts.of_model(AssumedCost(), "assumed")).run(Ladder("any", buckets))
    loads = [load for load in one.loads if buckets[load.graph].phase == "decode"]
    assert {load.num_seqs for load in loads} == set(range(1, MOST + 1))
    truth = scored("decode", [(load.num_seqs, load.length, load.replays) for load in loads], pairs, 16)
    assert {(use.bucket.batch, use.bucket.seq): use.replays for use in one.of_phase("decode")} == truth.steps
    # The scorer was told whole blocks; the true lengths are what was asked for.
    asked = sum(load.num_seqs * load.longest for load in loads)
    assert asked < truth.asked <= asked + 16 * sum(load.num_seqs * load.replays for load in loads)
    assert one.padded_tokens("decode") == truth.computed - asked


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_shares_are_those_of_the_docs(name: str) -> None:
    path = TRACES / PUBLISHED[name]
    if not path.is_file():
        pytest.skip("the trace is not on this machine; LLMC_TEST_TRACES names its folder")
    trace = read_trace(path, prefixes=False)
    phase = plan(trace, limits=Limits(max_graphs=24), phases=("prefill",)).phases[0]
    lengths = Counter(np.minimum(trace.prompt_tokens, 4096).tolist())
    padded = {}
    for ladder in (phase.score, *phase.others):
        truth: Scored = scored("prefill", [(1, n, count) for n, count in lengths.items()], list(ladder.pairs), 32)
        assert ladder.padding == pytest.approx(truth.padding, abs=1e-12)
        padded[ladder.name] = truth.computed - truth.asked
    row = re.search(rf"^\| {name}, conversation \|(.*)\|$", DOCS.read_text(encoding="utf-8"), re.MULTILINE)
    assert row is not None
    shares = [float(text) for text in re.findall(r"([0-9.]+) %", row[1])]
    rules = ("ramp-up", "ramp-up, tuned", "exponential")
    assert shares == [round(100 * padded["planned"] / padded[rule], 1) for rule in rules]
