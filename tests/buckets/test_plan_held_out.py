"""Plans that hold on steps they have not seen: evidence of several cases, blurring, the choice by held-out parts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmc.buckets.bucket import REQUIRED_PHASES, Bucket
from llmc.buckets.candidates import PhaseProblem
from llmc.buckets.cost import TokensCost
from llmc.buckets.demand import Demand, ServerModel
from llmc.buckets.evidence import Blur, Case, Evidence, blurred, even, exact_cost, joined
from llmc.buckets.held_out import TUNED, HeldOut, Learner, Rule
from llmc.buckets.planner import Limits, Resources, complete, plan
from llmc.buckets.scenarios import OWN, Scenario, scenarios
from llmc.buckets.trace import Trace, read_trace, write_trace
from llmc.cli.main import main
from llmc.runtime.simulation import plan as plan_simulation
from llmc.runtime.simulation.plan import SimulatedPlan
from llmc.runtime.simulation.what_if import Ladder, Server, WhatIf, asked_tokens

from support.planning import ASSUMED, SERVER, made_up_trace
from support.traces import PUBLISHED, TRACES

ALL = scenarios(pinned=False, guessed_prefill=True)
LONGEST, MOST, BLOCK = 1024, 8, 32
MODEL = ServerModel(LONGEST, MOST)


def decode(rng: np.random.Generator, low: int, high: int, batches: tuple[int, int], steps: int = 300) -> Demand:
    sizes = rng.integers(*batches, steps), rng.integers(low, high, steps)
    return Demand("decode", *sizes, np.ones(steps))


def learner(evidence: Evidence, count: int = 8) -> Learner:
    def problem_of(demand: Demand) -> PhaseProblem:
        return PhaseProblem.of(demand, MODEL, TokensCost(), BLOCK)

    return Learner(evidence, problem_of, MODEL, count, BLOCK)


def of_parts(*parts: Demand | None) -> Evidence:
    folds = tuple((n,) for n in range(len(parts)))
    return Evidence("decode", (Case("own pace", 1.0, parts, own=True),), folds)


def choice(evidence: Evidence) -> HeldOut:
    chosen = learner(evidence).choose()
    assert chosen is not None
    return chosen


# ---- the choice ----------------------------------------------------------------------------------------------------


def test_steps_that_come_again_are_planned_for() -> None:
    rng = np.random.default_rng(0)
    one = choice(of_parts(*(decode(rng, 300, 420, (2, 4)) for _ in range(2))))
    assert isinstance(one.way, Blur)
    assert one.share <= one.worst < 0.95
    assert one.padding < one.by_rule


def test_steps_that_do_not_come_again_are_left_to_the_rule() -> None:
    """Halves that have nothing in common: what is planned for one is of no use for the other."""
    rng = np.random.default_rng(0)
    one = choice(of_parts(decode(rng, 20, 60, (1, 2)), decode(rng, 900, 1000, (7, 9))))
    assert isinstance(one.way, Rule)
    assert one.worst >= 1
    planned = plan(made_up_trace(50), MODEL, Limits(8), phases=("decode",), evidence={
        "decode": of_parts(decode(rng, 20, 60, (1, 2)), decode(rng, 900, 1000, (7, 9)))
    }).phases[0]  # fmt: skip
    assert planned.held_out is not None
    assert isinstance(planned.held_out.way, Rule)
    assert planned.score.pairs in {other.pairs for other in planned.others}


def test_the_held_out_score_is_that_of_parts_that_were_not_seen() -> None:
    rng = np.random.default_rng(3)
    parts = [decode(rng, 100, 500, (1, 5)) for _ in range(2)]
    evidence = of_parts(*parts)
    one = choice(evidence)
    assert isinstance(one.way, Blur)
    mine = learner(evidence)
    computed = asked = 0.0
    for seen, unseen in ((parts[0], parts[1]), (parts[1], parts[0])):
        ladder = plan(made_up_trace(50), MODEL, Limits(8), phases=("decode",), evidence={"decode": Evidence.of(seen)})
        assert len(ladder.phases[0].buckets) <= 8
        computed += mine.problem_of(unseen).evaluate(list(ladder.phases[0].score.pairs)).tokens / unseen.tokens
        asked += 1
    # A plan of one half without blurring, made with the whole search, pads about as much.
    assert one.padding == pytest.approx(1 - asked / computed, abs=0.05)


def test_nothing_is_held_out_where_a_half_is_empty() -> None:
    rng = np.random.default_rng(0)
    assert learner(of_parts(decode(rng, 20, 60, (1, 2)), None)).choose() is None
    assert learner(Evidence.of(decode(rng, 20, 60, (1, 2)))).choose() is None


# ---- evidence ------------------------------------------------------------------------------------------------------


def test_cases_count_by_what_rules_pad_in_them_not_by_their_steps() -> None:
    rng = np.random.default_rng(1)
    quiet, busy = decode(rng, 64, 900, (1, 2)), decode(rng, 64, 900, (8, 9))
    many = replace(busy, weight=busy.weight * 1000)
    blends = []
    for loud in (busy, many):
        cases = (Case("own pace", 1.0, (quiet,), own=True), Case("busy", 1.0, (loud,)))
        blends.append(learner(Evidence("decode", cases)).blended())
    shares = [float(one.weight[one.batch == 8].sum() / one.weight.sum()) for one in blends]
    assert shares[0] == pytest.approx(shares[1])
    assert 0.05 < shares[0] < 0.95
    assert blends[0].weight.sum() == pytest.approx(quiet.weight.sum())


@given(st.floats(0, 1), st.integers(1, 4096))
def test_blurred_demand_is_as_much_and_within_the_longest(width: float, top: int) -> None:
    rng = np.random.default_rng(2)
    demand = Demand(
        "decode", rng.integers(1, 5, 40), rng.integers(1, top + 1, 40), rng.integers(1, 9, 40).astype(float)
    )
    result = blurred(demand, width, top, 32)
    assert result.weight.sum() == pytest.approx(demand.weight.sum())
    assert result.seq.min() >= 1
    assert result.seq.max() <= top
    if width == 0:
        assert result is demand


def test_even_demand_has_all_shapes_and_exact_cost_is_unpadded() -> None:
    flat = even("decode", MODEL)
    assert set(flat.batch.tolist()) == set(range(1, MOST + 1))
    assert flat.seq.max() == LONGEST
    assert set(even("prefill", MODEL).batch.tolist()) == {1}
    assert exact_cost(flat, TokensCost()) == flat.tokens
    twice = joined([flat, replace(flat, asked=flat.asked_each * 0.9)])
    assert twice.tokens == pytest.approx(1.9 * flat.tokens)


# ---- scenarios -----------------------------------------------------------------------------------------------------


def test_scenarios_vary_pace_rate_and_mixed_steps_but_what_is_known() -> None:
    assert ALL[0] is OWN
    assert OWN.weight == max(one.weight for one in ALL)
    assert {one.mixed for one in ALL} == {True, False}
    assert min(one.speed for one in ALL) < 1 < max(one.speed for one in ALL)
    assert min(one.prefill for one in ALL) < 1 < max(one.prefill for one in ALL)
    known = scenarios(pinned=False, guessed_prefill=False)
    assert {one.prefill for one in known} == {1.0}
    assert scenarios(pinned=True, guessed_prefill=True) == (OWN,)


def planned(trace: Trace, server: ServerModel, graphs: int, met: tuple[Scenario, ...]) -> SimulatedPlan:
    return plan_simulation.plan(
        trace, server, Limits(graphs), ASSUMED,
        by_tokens=True, block_size=32, phases=REQUIRED_PHASES, resources=Resources(), scenarios=met,
    )  # fmt: skip


def test_a_phase_that_rests_on_few_steps_is_told() -> None:
    """All requests at once: mixed steps take what decodes, and few steps are left for the plan."""
    rng = np.random.default_rng(0)
    trace = Trace("rush", np.zeros(500), rng.integers(500, 2000, 500), rng.integers(2, 5, 500))
    told = planned(trace, SERVER, 6, (OWN,))
    assert any("decode steps" in warning and "too few to plan by" in warning for warning in told.warnings)
    quiet = Trace("quiet", np.arange(60, dtype=np.float64) * 10.0, rng.integers(50, 900, 60), np.full(60, 60))
    assert planned(quiet, SERVER, 6, (OWN,)).warnings == ()


def test_the_pool_of_a_long_model_is_as_large_as_its_requests() -> None:
    simulation = plan_simulation._Simulation.of(
        made_up_trace(20), ServerModel(1 << 24, 16), ASSUMED, 32, REQUIRED_PHASES, ALL, in_seconds=False
    )
    for runs in simulation.runs.values():
        assert all(run.server.num_blocks <= (1 << 24) // 32 + 1 for run in runs)


def padded(trace: Trace, pairs: dict[str, tuple[tuple[int, int], ...]], server: ServerModel, phase: str) -> int:
    ladder = complete(
        {name: tuple(Bucket(name, *pair) for pair in pairs[name]) for name in REQUIRED_PHASES}, server, 32
    )
    buckets = tuple(ladder)
    engine = Server(server.max_model_len, server.max_num_seqs, 32, prefix_cache=False)
    loads = WhatIf(trace, engine, ASSUMED).loads(Ladder("any", buckets))
    mine = [(buckets[load.graph], load) for load in loads if buckets[load.graph].phase == phase]
    return sum(load.replays * one.batch * one.seq - asked_tokens(one, load) for one, load in mine)


@pytest.mark.slow
@pytest.mark.parametrize("name", PUBLISHED)
def test_on_the_other_half_a_plan_pads_less_than_tuned_ramp_up(name: str) -> None:
    path: Path = TRACES / PUBLISHED[name]
    if not path.is_file():
        pytest.skip("the trace is not on this machine; LLMC_TEST_TRACES names its folder")
    server = ServerModel(4096, 16)
    seen, unseen = plan_simulation.halves(read_trace(path, prefixes=False).first(2000))
    made = planned(seen, server, 24, ALL).plan
    mine = {phase.phase: phase.score.pairs for phase in made.phases}
    rule = {phase.phase: next(other.pairs for other in phase.others if other.name == TUNED) for phase in made.phases}
    assert padded(unseen, mine, server, "decode") < 0.85 * padded(unseen, rule, server, "decode")


# ---- the command ---------------------------------------------------------------------------------------------------


def test_the_command_prints_the_held_out_score(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_trace(tmp_path / "long.jsonl", made_up_trace(420))
    write_trace(tmp_path / "short.jsonl", made_up_trace(40))
    options = ["--max-graphs", "4", "--max-model-len", "2048"]
    argv = ["buckets", "plan", "--trace", str(tmp_path / "long.jsonl"), *options]
    assert main([*argv, "--scenarios", "own", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert [one["name"] for one in data["scenarios"]] == [OWN.name]
    for phase in REQUIRED_PHASES:
        held_out = data["phases"][phase]["held_out"]
        assert 0 < held_out["padding"] < 1
        assert held_out["worst"] >= max(held_out["share"], held_out["own"])
        assert all(ladder["buckets"] for ladder in data["phases"][phase]["ladders"])
    assert main(argv) == 0
    shown = capsys.readouterr().out
    assert shown.count("held out, planned on one half") == 2
    assert all(one.name in shown for one in ALL)
    assert main(["buckets", "plan", "--trace", str(tmp_path / "short.jsonl"), *options, "--prefill-rate", "9000"]) == 0
    shown = capsys.readouterr().out
    assert shown.count("held out: too few requests") == 2
    assert "no mixed steps" in shown
    assert "prefill 4 times" not in shown
