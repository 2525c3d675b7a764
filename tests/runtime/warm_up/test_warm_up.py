"""The warm-up on its own: what it replays, measures and tells, on an engine that only keeps a record."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from llmc.runtime.binding import GraphInfo
from llmc.runtime.warm_up.disturbance import BUSY, Mark
from llmc.runtime.warm_up.measuring import Load, MeasuredLoad, Measurer, full_load, half_load, light_load, typical
from llmc.runtime.warm_up.warm_up import WarmCounts, WarmPlan, WarmStep, WarmUp

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


@dataclass
class Machine:
    """How busy it is: seconds that an engine thread waits in each replay, in turn and then 0; the share others take."""

    waits: list[float] = field(default_factory=list)
    others: float = 0.0

    def mark(self) -> Mark:
        return Mark(0.0, {})

    def waited_s(self, since: Mark) -> float:
        return self.waits.pop(0) if self.waits else 0.0

    def taken(self, since: Mark) -> float:
        return self.others


def graph(phase: str, batch: int, seq: int) -> GraphInfo:
    tokens = batch if phase == "decode" else batch * seq
    blocks = -(-seq // BLOCK) if phase == "decode" else MAX_LEN // BLOCK
    return GraphInfo(phase, batch, seq, tokens, batch, batch, blocks, 10, 1000)


GRAPHS = [graph("prefill", 1, 16), graph("prefill", 2, 64), graph("decode", 1, 32), graph("decode", 4, 64)]


def warm_up(engine: Recorder, plan: WarmPlan | None = None, machine: Machine | None = None) -> WarmUp:
    watch = machine or Machine()
    return WarmUp(engine, GRAPHS, plan, block_size=BLOCK, max_model_len=MAX_LEN, watch=watch)


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
    two = {"total": 2, "warm": 2, "replayed": 2, "walked": 0}
    assert warming.coverage()["by_phase"] == {"prefill": two, "decode": two}
    assert engine.enabled == {}


def test_a_replay_carries_the_whole_batch() -> None:
    engine = Recorder()
    run(engine)
    assert dict(engine.replays) == {i: Load(g.max_seqs, 1, 1) for i, g in enumerate(GRAPHS)}


def test_beyond_the_time_for_replays_graphs_of_the_same_kernels_are_walked() -> None:
    engine = Recorder()
    graphs = [graph("prefill", 1, 16), graph("prefill", 1, 64), graph("prefill", 2, 64), graph("decode", 1, 64)]
    plan = WarmPlan((1, 0, 2, 3), 4, replay_s=0)
    warming = WarmUp(engine, graphs, plan, block_size=BLOCK, max_model_len=MAX_LEN, watch=Machine())
    steps: list[WarmStep] = []
    warming.run(steps.append)
    assert [index for index, _ in engine.replays] == [1, 2, 3]
    assert engine.walks == [0]
    assert warming.done
    assert warming.counts == WarmCounts(replayed=3, walked=1)
    assert [step.replayed for step in steps] == [True, False, True, True]
    assert " walked in 0.05 ms" in steps[1].line()
    coverage = warming.coverage()
    assert (coverage["warm"], coverage["replayed"], coverage["walked"]) == (4, 3, 1)
    assert coverage["by_phase"] == {
        "prefill": {"total": 3, "warm": 3, "replayed": 2, "walked": 1},
        "decode": {"total": 1, "warm": 1, "replayed": 1, "walked": 0},
    }
    # A graph whose cost is wanted is replayed all the same.
    engine = Recorder()
    plan = WarmPlan((1, 0, 2, 3), 4, measure=frozenset({0}), measure_s=0, replay_s=0)
    WarmUp(engine, graphs, plan, block_size=BLOCK, max_model_len=MAX_LEN, watch=Machine()).run()
    assert engine.walks == []
    assert [index for index, _ in engine.replays] == [1, 0, 0, 0, 0, 2, 3]


def test_graphs_are_replayed_while_the_time_for_it_lasts() -> None:
    # The first replay of a graph takes a second and 1 ms here.
    graphs = [graph("decode", 1, 16 * (n + 1)) for n in range(4)]
    for seconds, walked in ((1.5, [1, 2, 3]), (2.5, [2, 3]), (60.0, [])):
        engine = Recorder()
        plan = WarmPlan((0, 1, 2, 3), 4, replay_s=seconds)
        WarmUp(engine, graphs, plan, block_size=BLOCK, max_model_len=MAX_LEN, watch=Machine()).run()
        assert engine.walks == walked


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
    assert step.line() == "[warm-up] decode  3/72 batch 4 context 64 replayed in 2.50 ms, 3.00 GiB free, 12 s left"


def measure(times: list[float], machine: Machine, measure_s: float = 0.09) -> tuple[MeasuredLoad, int]:
    """What is measured where replays take `times`, in turn, and the last one from then on; and how many there were."""
    left = list(times)
    replays: list[int] = []

    def replay(index: int, load: Load) -> int:
        replays.append(index)
        return round((left.pop(0) if len(left) > 1 else left[0]) * 1e9)

    found: list[MeasuredLoad] = []

    def work() -> Iterator[None]:
        found.append((yield from Measurer(replay, machine, measure_s=measure_s).measure(3, Load(1, 1, 16))))

    assert len(list(work())) == len(replays), "others get their turn before each replay"
    return found[0], len(replays)


def test_repeats_that_waited_for_a_cpu_do_not_count() -> None:
    waits = [0.02, 0.0, 0.02, 0.0, 0.0, 0.02, 0.0, 0.0, 0.0]
    times = [0.01 + wait for wait in waits]
    found, _ = measure(times, Machine(list(waits)), measure_s=0.1)
    assert found.seconds == pytest.approx(0.01)
    assert found.disturbed == 0
    assert found.repeats == 6
    assert found.deviation_s == pytest.approx(0, abs=1e-12)


def test_what_was_measured_under_load_says_so() -> None:
    found, replays = measure([0.022], Machine([0.0218] * 99), measure_s=0.2)
    assert found.disturbed == pytest.approx(0.0218 / 0.022, abs=1e-3)
    assert found.disturbed > BUSY
    assert replays == 27, "patient, but not for ever"
    # Other programs beside the engine's threads slow memory down, even where none of these waits.
    assert measure([0.01], Machine(others=0.5))[0].disturbed == 0.5
    assert measure([0.01], Machine())[0].disturbed == 0


def test_the_spread_of_the_repeats_is_noted() -> None:
    found, _ = measure([0.01, 0.012, 0.008], Machine(), measure_s=0.031)
    assert found.repeats == 3
    assert found.seconds == pytest.approx(0.01)
    assert found.deviation_s == pytest.approx(0.002)


def beside(machine: Machine, within_s: float) -> tuple[WarmUp, list[WarmStep], Recorder]:
    """A start that measures what is quick."""
    engine = Recorder()
    plan = WarmPlan((3, 1, 0, 2), 4, measure=frozenset(range(4)), measure_within_s=within_s)
    steps: list[WarmStep] = []
    warming = warm_up(engine, plan, machine)
    warming.run(steps.append)
    return warming, steps, engine


# Light replays take a second each here, being a graph's first: the estimate has them in it.
LONG_ENOUGH = 60.0


def test_an_idle_machine_measures_beside_a_start_what_is_quick() -> None:
    warming, steps, engine = beside(Machine(), LONG_ENOUGH)
    assert warming.done
    assert [step.done for step in steps] == [1, 2, 3, 4]
    assert not any(step.measured for step in steps[:-1]), "all graphs are warm first"
    measured = steps[-1].measured
    assert {one.graph for one in measured} == set(range(4))
    assert all(one.repeats == 3 for one in measured)
    assert (1, Load(2, 64, 64)) in engine.replays
    assert steps[-1].note == ""


def test_nothing_is_measured_beside_a_start_on_a_busy_machine() -> None:
    warming, steps, engine = beside(Machine(others=BUSY), LONG_ENOUGH)
    assert warming.done
    assert not any(step.measured for step in steps)
    assert "other programs keep this machine busy" in steps[-1].note
    assert len(engine.replays) == 4
    # It becomes busy meanwhile: what was disturbed is not kept.
    warming, steps, _ = beside(Machine(waits=[0.0] * 9 + [9.0] * 99), LONG_ENOUGH)
    assert warming.done
    assert all(one.disturbed == 0 for one in steps[-1].measured)
    assert len({one.graph for one in steps[-1].measured}) < 4
    assert "busy" in steps[-1].note


def test_what_takes_long_is_not_measured_beside_a_start() -> None:
    warming, steps, engine = beside(Machine(), 0.1)
    assert warming.done
    assert not steps[-1].measured
    assert "it would take more than" in steps[-1].note
    assert "llmc warmup" in steps[-1].note
    assert len(engine.replays) == 4, "nothing longer than that was tried"


class Quick(Recorder):
    """A graph's first replay takes no longer than another one."""

    def warm_load(self, graph: int, num_seqs: int, tokens_each: int, context: int) -> int:
        self.replays.append((graph, Load(num_seqs, tokens_each, context)))
        return num_seqs * tokens_each * 1_000_000


@pytest.mark.parametrize(
    ("within_s", "longest"),
    [
        (0.04, 4),  # the light loads of all graphs, of 8 tokens, twice, three times over: 48 ms
        (0.09, 8),  # a prompt of 2 x 16 tokens three times over: 96 ms
        (0.3, 32),  # of 2 x 64 tokens: 384 ms
        (0.5, 128),  # all of it
    ],
)
def test_the_estimate_itself_takes_little(within_s: float, longest: int) -> None:
    engine = Quick()
    plan = WarmPlan((3, 1, 0, 2), 4, measure=frozenset(range(4)), measure_within_s=within_s)
    steps: list[WarmStep] = []
    warm_up(engine, plan).run(steps.append)
    assert not steps[-1].measured
    assert "it would take more than" in steps[-1].note
    assert max(load.tokens for _, load in engine.replays) == longest


def test_a_warm_up_that_is_skipped_replays_nothing_and_is_ready() -> None:
    engine = Recorder()
    warming = warm_up(engine, WarmPlan((3, 1, 0), 3, dropped=frozenset({2}), skipped=True))
    warming.restrict()
    warming.run()
    assert warming.hot_done
    assert warming.done
    assert warming.advance() is None
    assert (engine.replays, engine.walks) == ([], [])
    assert engine.enabled == {2: False}
    coverage = warming.coverage()
    assert (coverage["skipped"], coverage["total"], coverage["warm"]) == (True, 3, 0)


def test_graphs_that_join_are_counted() -> None:
    warming, _ = run(Recorder())
    warming.joined([graph("decode", 3, 64), graph("mixed", 2, 32)])
    assert warming.done
    coverage = warming.coverage()
    assert (coverage["total"], coverage["warm"], coverage["replayed"]) == (6, 6, 6)
    assert coverage["by_phase"] == {
        "prefill": {"total": 2, "warm": 2, "replayed": 2, "walked": 0},
        "decode": {"total": 3, "warm": 3, "replayed": 3, "walked": 0},
        "mixed": {"total": 1, "warm": 1, "replayed": 1, "walked": 0},
    }


@pytest.mark.parametrize(
    "bad", [((0, 0), 1, frozenset()), ((0, 1), 0, frozenset()), ((0,), 2, frozenset()), ((0, 1), 1, frozenset({1}))]
)
def test_a_plan_that_makes_no_sense_is_refused(bad: tuple[tuple[int, ...], int, frozenset[int]]) -> None:
    order, hot, dropped = bad
    with pytest.raises(ValueError, match=r"warm-up replays|num_hot"):
        WarmPlan(order, hot, dropped=dropped)
