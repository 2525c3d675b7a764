"""Plans made with the simulation: for the steps that the scheduler makes, and never dearer there than rules."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmc.buckets import Bucket, BucketError, select
from llmc.buckets.bucket import REQUIRED_PHASES, area
from llmc.buckets.candidates import PhaseProblem
from llmc.buckets.contexts import Contexts
from llmc.buckets.cost import CostModel, FlopsCost, TokensCost
from llmc.buckets.cost_table import CostTable, ReplayCost
from llmc.buckets.demand import Demand, ServerModel
from llmc.buckets.planner import Limits, Resources
from llmc.buckets.step_cost import StepCosts, num_pairs
from llmc.buckets.trace import Trace, collect
from llmc.buckets.trace_lines import Request
from llmc.runtime.simulation import plan as plan_simulation
from llmc.runtime.simulation.forms import FormChoice, FormUse
from llmc.runtime.simulation.plan import SimulatedPlan
from llmc.runtime.simulation.what_if import Ladder, Server, WhatIf

from support.planning import ASSUMED, SERVER, SHAPE, made_up_trace

TRACE = made_up_trace(300)
ROOFLINE = StepCosts.of_model(FlopsCost(SHAPE), "a roofline")


def skipping(pair_s: float = 0.0) -> StepCosts:
    """Of a target that skips padding: 1 ms, 0.1 ms a row, pair_s a pair."""
    full = [(Bucket("prefill", 1, s), 1, s, s) for s in (8, 64, 512)]
    full += [(Bucket("decode", b, 512), b, b, context) for b in (1, 8, 64) for context in (1, 512)]
    costs = tuple(ReplayCost(*load, 1e-3 + 1e-4 * load[2] + pair_s * num_pairs(*load[1:])) for load in full)
    return StepCosts.of_table(CostTable({"processor": "x"}, "ab" * 32, costs, "skipped"), "measured")


def planned(
    trace: Trace = TRACE, server: ServerModel = SERVER, graphs: int = 6, costs: StepCosts | None = None
) -> SimulatedPlan:
    return plan_simulation.plan(
        trace,
        server,
        Limits(graphs),
        costs or ASSUMED,
        by_tokens=costs is None,
        block_size=32,
        phases=REQUIRED_PHASES,
        resources=Resources(),
    )


@pytest.mark.parametrize("graphs", [1, 3, 8])
@pytest.mark.parametrize("costs", [None, ROOFLINE, skipping(1e-7)], ids=["tokens", "computed", "skipped"])
@pytest.mark.parametrize("prefill_batch", [1, 3])
def test_no_rule_is_cheaper_in_the_simulation(graphs: int, costs: StepCosts | None, prefill_batch: int) -> None:
    made = planned(server=replace(SERVER, max_prefill_batch=prefill_batch), graphs=graphs, costs=costs)
    mine, *others = made.tried
    assert mine.ladder == made.plan.ladder
    assert {other.name for other in others} == {"ramp-up", "ramp-up, tuned", "exponential"}
    for other in others:
        assert mine.score <= other.score
        for phase in REQUIRED_PHASES:
            assert len(getattr(other.ladder, phase)) <= graphs


def test_planner_and_simulation_count_the_same_steps() -> None:
    made = planned()
    server = Server(SERVER.max_model_len, SERVER.max_num_seqs, 32, prefix_cache=False)
    what_if = WhatIf(TRACE, server, ASSUMED)
    one = what_if.run(Ladder("planned", tuple(made.plan.ladder)))
    decode = next(phase for phase in made.plan.phases if phase.phase == "decode")
    assert sum(use.replays for use in one.of_phase("decode")) == decode.steps
    assert one.padding("decode") == pytest.approx(decode.score.padding)
    assert one.num_misses == 0


BLOCK, LONGEST, MOST = 16, 200, 6
decode_sizes = st.tuples(st.integers(1, MOST), st.integers(1, LONGEST // BLOCK).map(lambda n: n * BLOCK))


@given(
    st.sets(decode_sizes, max_size=7),
    st.sets(st.integers(1, LONGEST // BLOCK).map(lambda n: n * BLOCK), max_size=4),
    st.lists(st.tuples(st.floats(0, 0.3), st.integers(1, LONGEST - 1), st.integers(1, 40)), min_size=1, max_size=25),
    st.sampled_from(["tokens", "computed", "skipped"]),
)
@settings(max_examples=60, deadline=None)
def test_planner_gives_every_step_to_the_graph_that_the_scheduler_takes(
    decode: set[tuple[int, int]], prefill: set[int], requests: list[tuple[float, int, int]], unit: str
) -> None:
    """Whatever the ladder: the choice, the cost and the padding of the plan are those of the native scheduler."""
    costs = {"tokens": ASSUMED, "computed": ROOFLINE, "skipped": skipping()}[unit]
    model: CostModel = TokensCost() if unit == "tokens" else costs
    trace = collect(Path("made-up"), [Request(*row) for row in requests])
    pairs = {"decode": sorted(decode | {(MOST, LONGEST)}), "prefill": [(1, seq) for seq in sorted(prefill | {LONGEST})]}
    buckets = tuple(sorted(Bucket(phase, *pair) for phase in pairs for pair in pairs[phase]))
    loads = WhatIf(trace, Server(LONGEST, MOST, BLOCK, prefix_cache=False), costs).loads(Ladder("any", buckets))
    for load in loads:
        ran = buckets[load.graph]
        held = [bucket for bucket in buckets if bucket.phase == ran.phase]
        assert select(held, load.num_seqs, min(load.length, LONGEST)) == ran
    for phase in REQUIRED_PHASES:
        mine = [load for load in loads if buckets[load.graph].phase == phase]
        if not mine:
            continue
        columns = np.array([(load.num_seqs, min(load.length, LONGEST), load.replays) for load in mine])
        demand = Demand(phase, columns[:, 0], columns[:, 1], columns[:, 2].astype(float))
        problem = PhaseProblem.of(demand, ServerModel(LONGEST, MOST), model, BLOCK)
        outcome = problem.evaluate(pairs[phase])
        assert outcome.tokens == sum(load.replays * area(buckets[load.graph], BLOCK) for load in mine)
        # In candidate sizes, which are no larger than the buckets, the same ladder costs no more.
        total = problem.full.total(problem.cells_of(pairs[phase])) + problem.scorer.step_cost
        assert total <= outcome.cost * (1 + 1e-9)
        if unit == "tokens":
            assert outcome.cost == outcome.tokens
        elif phase == "decode" or unit == "computed":  # where prompts cost their rows, these are not rounded to blocks
            assert outcome.cost == pytest.approx(sum(load.ns for load in mine) / 1e9)


def test_where_padding_is_skipped_a_plan_has_no_graph_that_saves_no_time() -> None:
    costs, server = skipping(), Server(SERVER.max_model_len, SERVER.max_num_seqs, 32, prefix_cache=False)
    ladder = planned(costs=costs, graphs=24).plan.ladder
    assert [bucket.seq for bucket in ladder.prefill] == [SERVER.max_model_len]
    assert 1 < len(ladder.decode) < 24

    def seconds(buckets: tuple[Bucket, ...]) -> float:
        return sum(load.ns for load in WhatIf(TRACE, server, costs).loads(Ladder("any", buckets))) / 1e9

    whole = seconds(tuple(ladder))
    for one in ladder.decode[:-1]:
        assert seconds(tuple(bucket for bucket in ladder if bucket != one)) > whole


def test_a_long_trace_is_tried_in_stretches() -> None:
    trace = made_up_trace(8000)
    made = planned(trace)
    assert made.requests == 2000
    steps = {phase.phase: phase.steps for phase in made.plan.phases}
    assert steps["prefill"] >= 8000
    whole = planned(trace.first(5000)).plan.phases[1].steps * 8000 / 5000
    assert steps["decode"] == pytest.approx(whole, rel=0.1)


def test_parts_of_a_trace() -> None:
    part = TRACE.part(100, 140)
    assert len(part) == 40
    assert part.arrival_s[0] == 0
    assert np.array_equal(part.prompt_tokens, TRACE.prompt_tokens[100:140])
    assert np.diff(part.arrival_s) == pytest.approx(np.diff(TRACE.arrival_s[100:140]))
    assert len(TRACE.part(0, 0)) == 0


def test_requests_that_never_decode_are_told() -> None:
    silent = replace(TRACE, output_tokens=np.ones(len(TRACE), np.int64))
    with pytest.raises(BucketError, match="no request that decodes"):
        planned(silent)


def test_the_form_of_decode_buckets_that_suits_a_trace() -> None:
    """One long context among short ones, and contexts that are alike, on a target that computes padding."""
    rng = np.random.default_rng(5)
    arrivals = np.sort(rng.uniform(0, 4, 60))
    server = ServerModel(max_model_len=1024, max_num_seqs=8)

    def made(prompts: npt.NDArray[np.int64], contexts: Contexts) -> SimulatedPlan:
        trace = Trace("made-up", arrivals, prompts, np.full(60, 40))
        return plan_simulation.plan(
            trace, server, Limits(6), ASSUMED, by_tokens=True, block_size=32, phases=("decode",),
            resources=Resources(), contexts=contexts,
        )  # fmt: skip

    uneven = np.where(np.arange(60) % 8 == 0, 900, 30)
    found = made(uneven, Contexts.auto)
    assert found.forms is not None
    assert found.forms.suits is Contexts.total
    assert found.forms.total.padded < found.forms.longest.padded / 4
    assert found.forms.total.contexts == pytest.approx(found.forms.longest.contexts)
    assert all(bucket.total for one in found.tried for bucket in one.ladder.decode)
    assert not any(bucket.total for bucket in made(uneven, Contexts.longest).plan.ladder.decode)
    # Why, with figures; and a ladder of both forms for who wants one, though it is no cheaper here.
    assert found.forms.uneven > 0.5
    assert f"{found.forms.uneven:.1%} of sequences × longest context belongs to no sequence" in found.forms.why(
        "tokens"
    )
    assert found.forms.both is not None
    mixed = made(uneven, Contexts.both)
    assert {bucket.total for bucket in mixed.plan.ladder.decode} == {False, True}
    assert mixed.tried[0].cost == pytest.approx(found.forms.both.cost, rel=0.05)
    alike = made(np.full(60, 30), Contexts.auto).forms
    assert alike is not None
    assert alike.uneven < 0.5


def test_what_suits_is_told_with_figures() -> None:
    def use(cost: float, *, total: bool = False) -> FormUse:
        return FormUse(total, 4, 100, 1000.0, 300.0, 0.0 if total else 600.0, cost)

    longest, total = use(10.0), use(8.0, total=True)
    assert FormChoice(longest, total).suits is Contexts.total
    assert "it saves 20.0% of the cost of decode steps, in s; 50.0% of seq" in FormChoice(longest, total).why("s")
    assert FormChoice(longest, use(12.0, total=True)).suits is Contexts.longest
    assert FormChoice(longest, total, use(7.0)).suits is Contexts.both
    assert "both forms together suit this trace: they save 12.5%" in FormChoice(longest, total, use(7.0)).why("s")
    assert FormChoice(longest, use(9.95, total=True)).suits is None
    assert "less than 1 %" in FormChoice(longest, use(9.95, total=True)).why("s")
