"""Plans made with the simulation: for the steps that the scheduler makes, and never dearer there than rules."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from test_planner import SERVER, SHAPE, made_up_trace

from llmc.buckets import BucketError
from llmc.buckets.cost import CostModel, FlopsCost, TokensCost
from llmc.buckets.demand import ServerModel
from llmc.buckets.planner import PHASES, Limits, Resources
from llmc.buckets.step_cost import AssumedCost, StepCosts
from llmc.buckets.trace import Trace
from llmc.cli import plan_simulation
from llmc.cli.plan_simulation import SimulatedPlan
from llmc.cli.simulation import Ladder, Server, WhatIf

TRACE = made_up_trace(300)


def planned(
    trace: Trace = TRACE, server: ServerModel = SERVER, graphs: int = 6, cost: CostModel | None = None
) -> SimulatedPlan:
    cost = cost or TokensCost()
    clock = AssumedCost() if isinstance(cost, TokensCost) else cost
    return plan_simulation.plan(
        trace,
        server,
        Limits(graphs),
        cost,
        StepCosts.of_model(clock, "made up"),
        block_size=32,
        phases=PHASES,
        resources=Resources(),
    )


@pytest.mark.parametrize("graphs", [1, 3, 8])
@pytest.mark.parametrize("cost", [TokensCost(), FlopsCost(SHAPE)])
@pytest.mark.parametrize("prefill_batch", [1, 3])
def test_no_rule_is_cheaper_in_the_simulation(graphs: int, cost: CostModel, prefill_batch: int) -> None:
    made = planned(server=replace(SERVER, max_prefill_batch=prefill_batch), graphs=graphs, cost=cost)
    mine, *others = made.tried
    assert mine.ladder == made.plan.ladder
    assert {other.name for other in others} == {"ramp-up", "ramp-up, tuned", "exponential"}
    for other in others:
        assert mine.cost <= other.cost
        for phase in PHASES:
            assert len(getattr(other.ladder, phase)) <= graphs


def test_planner_and_simulation_count_the_same_steps() -> None:
    made = planned()
    server = Server(SERVER.max_model_len, SERVER.max_num_seqs, 32, prefix_cache=False)
    what_if = WhatIf(TRACE, server, StepCosts.of_model(AssumedCost(), "made up"))
    one = what_if.run(Ladder("planned", tuple(made.plan.ladder)))
    decode = next(phase for phase in made.plan.phases if phase.phase == "decode")
    assert sum(use.replays for use in one.of_phase("decode")) == decode.steps
    # The scheduler takes the smallest batch that holds a step, which may be in a longer bucket than the cheapest.
    assert one.padding("decode") >= decode.score.padding * (1 - 1e-9)
    assert one.num_misses == 0


def test_a_long_trace_is_tried_in_stretches() -> None:
    trace = made_up_trace(8000)
    made = planned(trace)
    assert made.requests == 5000
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
