"""The warm-up on its own: what it replays, measures and tells, on an engine that only keeps a record."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import pytest

from llmc.runtime.binding import GraphInfo
from llmc.runtime.warmup import Load, WarmPlan, WarmStep, WarmUp, full_load, half_load, light_load, typical

BLOCK, MAX_LEN = 16, 64


@dataclass
class Recorder:
    """Counts replays; each takes as many milliseconds as it has tokens, a graph's first one longer."""

    replays: list[tuple[int, Load]] = field(default_factory=list)
    walks: list[int] = field(default_factory=list)
    enabled: dict[int, bool] = field(default_factory=dict)

    def warm_load(self, graph: int, num_seqs: int, tokens_each: int, context: int) -> int:
        cold = all(graph != other for other, _ in self.replays)
        self.replays.append((graph, Load(num_seqs, tokens_each, context)))
        return num_seqs * tokens_each * 1_000_000 + cold * 1_000_000_000

    def walk_graph(self, graph: int) -> int:
        self.walks.append(graph)
        return 50_000

    def enable_graph(self, graph: int, on: bool) -> None:
        self.enabled[graph] = on


def graph(phase: str, batch: int, seq: int) -> GraphInfo:
    tokens = batch if phase == "decode" else batch * seq
    blocks = -(-seq // BLOCK) if phase == "decode" else MAX_LEN // BLOCK
    return GraphInfo(phase, batch, seq, tokens, batch, batch, blocks, 10, 1000)


GRAPHS = [graph("prefill", 1, 16), graph("prefill", 2, 64), graph("decode", 1, 32), graph("decode", 4, 64)]


def warm_up(engine: Recorder, plan: WarmPlan | None = None) -> WarmUp:
    return WarmUp(engine, GRAPHS, plan, block_size=BLOCK, max_model_len=MAX_LEN)


def run(engine: Recorder, plan: WarmPlan | None = None, **options: bool) -> tuple[WarmUp, list[WarmStep]]:
    steps: list[WarmStep] = []
    warming = warm_up(engine, plan)
    warming.run(steps.append, **options)
    return warming, steps


def test_every_graph_is_replayed_once_the_dearest_first() -> None:
    engine = Recorder()
    warming, steps = run(engine)
    assert [index for index, _ in engine.replays] == [1, 0, 3, 2]
    assert [step.done for step in steps] == [1, 2, 3, 4]
    assert warming.done
    assert warming.coverage()["by_phase"] == {"prefill": {"total": 2, "warm": 2}, "decode": {"total": 2, "warm": 2}}
    assert engine.enabled == {}


def test_a_replay_carries_the_whole_batch() -> None:
    engine = Recorder()
    run(engine)
    assert dict(engine.replays) == {i: Load(g.max_seqs, 1, 1) for i, g in enumerate(GRAPHS)}


def test_graphs_of_the_same_kernels_are_walked_once_one_was_replayed() -> None:
    engine = Recorder()
    graphs = [graph("prefill", 1, 16), graph("prefill", 1, 64), graph("prefill", 2, 64), graph("decode", 1, 64)]
    plan = WarmPlan((1, 0, 2, 3), 4)
    warming = WarmUp(engine, graphs, plan, block_size=BLOCK, max_model_len=MAX_LEN)
    warming.run()
    assert [index for index, _ in engine.replays] == [1, 2, 3]
    assert engine.walks == [0]
    assert warming.done
    # A graph whose cost is wanted is replayed all the same.
    engine = Recorder()
    plan = WarmPlan((1, 0, 2, 3), 4, measure=frozenset({0}), measure_s=0)
    WarmUp(engine, graphs, plan, block_size=BLOCK, max_model_len=MAX_LEN).run()
    assert engine.walks == []
    assert [index for index, _ in engine.replays] == [1, 0, 0, 0, 0, 2, 3]


def test_full_loads_fill_the_buckets() -> None:
    loads = [full_load(g, BLOCK, MAX_LEN) for g in GRAPHS]
    assert loads == [Load(1, 16, 16), Load(2, 64, 64), Load(1, 1, 32), Load(4, 1, 64)]
    # A bucket that reaches beyond the limits is as full as they allow.
    assert full_load(graph("prefill", 2, 128), BLOCK, MAX_LEN) == Load(4 // 2, 64, 64)
    assert full_load(graph("decode", 2, 100), BLOCK, MAX_LEN) == Load(2, 1, 64)
    assert light_load(GRAPHS[3]) == Load(4, 1, 1)
    mixed = GraphInfo("mixed", 4, 48, 48, 4, 4, MAX_LEN // BLOCK, 10, 1000)
    assert (light_load(mixed), full_load(mixed, BLOCK, MAX_LEN)) == (Load(4, 1, 1), Load(1, 48, 48))


def test_half_loads_have_as_many_sequences_of_half_the_length() -> None:
    loads = [half_load(g, BLOCK, MAX_LEN) for g in (*GRAPHS, graph("prefill", 1, 1))]
    assert loads == [Load(1, 8, 8), Load(2, 32, 32), Load(1, 1, 32), Load(4, 1, 64), Load(1, 1, 1)]


def test_a_typical_time_is_a_mean_that_no_single_one_decides() -> None:
    assert typical([4.0]) == 4.0
    # Two humps: their mean, however they lie.
    assert typical([2.0, 1.0, 2.0, 1.0, 1.0, 2.0, 1.0, 1.0, 1.0]) == pytest.approx(12 / 9)
    assert typical([2.0, 2.0, 90.0, 2.0]) == pytest.approx((6 + 6) / 4)


def test_measured_are_the_graphs_asked_for_without_their_first_replay() -> None:
    engine = Recorder()
    _, steps = run(engine, WarmPlan((3, 1, 0, 2), 4, measure=frozenset({1, 3}), measure_s=0.02))
    measured = {(m.graph, m.load): (m.seconds, m.repeats) for step in steps for m in step.measured}
    assert measured == {
        (3, Load(4, 1, 1)): (0.004, 5),
        (3, Load(4, 1, 64)): (0.004, 5),
        (1, Load(2, 1, 1)): (0.002, 9),  # no more than nine
        (1, Load(2, 32, 32)): (0.064, 1),  # no less than one
        (1, Load(2, 64, 64)): (0.128, 1),
    }
    counts = {index: sum(index == other for other, _ in engine.replays) for index in range(4)}
    assert counts == {3: 11, 1: 12, 0: 1, 2: 1}


def test_hot_graphs_come_first_and_others_join_one_by_one() -> None:
    engine = Recorder()
    warming = warm_up(engine, WarmPlan((3, 1, 0), 2, dropped=frozenset({2})))
    warming.restrict()
    assert engine.enabled == {0: False, 2: False}
    warming.run(hot_only=True)
    assert warming.hot_done
    assert not warming.done
    assert engine.enabled == {0: False, 2: False}
    warming.run()
    assert warming.done
    assert engine.enabled == {0: True, 2: False}
    assert warming.coverage()["dropped"] == 1
    assert warming.advance() is None


def test_stopped_it_keeps_what_it_has() -> None:
    engine = Recorder()
    warming = warm_up(engine)
    steps: list[WarmStep] = []

    def stop_after_two(step: WarmStep) -> None:
        steps.append(step)
        warming.stopped = len(steps) == 2

    warming.run(stop_after_two)
    assert warming.num_warm == len(steps) == 2
    assert not warming.done


def test_the_estimate_falls_to_nothing() -> None:
    _, steps = run(Recorder(), WarmPlan.of_all(GRAPHS))
    estimates = [step.remaining_s for step in steps]
    assert all(a >= b for a, b in itertools.pairwise(estimates))
    assert estimates[-1] == 0
    assert estimates[0] > 0


def test_a_line_tells_graph_time_and_memory() -> None:
    step = WarmStep(3, 72, GRAPHS[3], 2_500_000, (), 12.4, 3 << 30)
    assert step.line() == "[warm-up] decode  3/72 batch 4 context 64 2.50 ms, 3.00 GiB free, 12 s left"


@pytest.mark.parametrize(
    "bad", [((0, 0), 1, frozenset()), ((0, 1), 0, frozenset()), ((0,), 2, frozenset()), ((0, 1), 1, frozenset({1}))]
)
def test_a_plan_that_makes_no_sense_is_refused(bad: tuple[tuple[int, ...], int, frozenset[int]]) -> None:
    order, hot, dropped = bad
    with pytest.raises(ValueError, match=r"warm-up replays|num_hot"):
        WarmPlan(order, hot, dropped=dropped)
