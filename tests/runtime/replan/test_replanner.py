"""A server that plans its own buckets, over an engine that only tells what ran: proposals, trials, back-off, bounds."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from llmc import ModelPathError
from llmc.buckets.bucket import Bucket
from llmc.buckets.replanning.proposal import Policy
from llmc.buckets.replanning.shapes import Limits, StepShape
from llmc.runtime.binding import GraphInfo, LlmcError
from llmc.runtime.binding.statistics import BucketMiss
from llmc.runtime.binding.statistics import StepShape as EngineSteps
from llmc.runtime.replan.decisions import MAX_DECISIONS, DecisionLog
from llmc.runtime.replan.options import ReplanOptions, parse_mode
from llmc.runtime.replan.replanner import Replanner
from llmc.runtime.replan.retired import RetiredBuckets, spared
from llmc.runtime.replan.steps import LadderFacts, StepReader
from llmc.runtime.request_error import RequestError
from llmc.runtime.server.replan_metrics import ReplanCollector

LIMITS = Limits(256, 8, 16)
LARGE, PROMPT = Bucket("decode", 8, 256), Bucket("prefill", 1, 256)
EAGER = Policy(unit="tokens", least_steps=10, max_added=1, once_s=0, graph_s=0)


def graph(bucket: Bucket) -> GraphInfo:
    return GraphInfo(bucket.phase, bucket.batch, bucket.seq, bucket.max_tokens, bucket.batch, bucket.batch,
                     LIMITS.context(bucket) // 16, 10, 1000 * bucket.max_tokens,
                     bucket.seq // 16 if bucket.total else 0)  # fmt: skip


@dataclass
class Engine:
    """Runs `load` steps of decode in the bucket that the scheduler would take, at every look: sequences, context,
    number of steps, total of contexts (all as long as the longest without it)."""

    graphs: list[GraphInfo]
    on: dict[int, bool]
    load: list[tuple[int, ...]] = field(default_factory=list)
    seconds: Callable[[Bucket], float] = lambda bucket: 1e-3 * bucket.batch
    misses: list[BucketMiss] = field(default_factory=list)
    switched: list[tuple[int, bool]] = field(default_factory=list)
    released: list[int] = field(default_factory=list)

    def take_step_shapes(self) -> tuple[list[EngineSteps], int]:
        rows = []
        for sequences, context, count, *more in self.load:
            shape = StepShape("decode", sequences, sequences, sequences, context, *more)
            able = {g.bucket: i for i, g in enumerate(self.graphs) if self.on[i]}
            bucket = LIMITS.choose(able, shape)
            assert bucket is not None, "a step has no bucket"
            ns = int(1e9 * self.seconds(bucket))
            rows.append(EngineSteps("decode", able[bucket], sequences, sequences, sequences, context // 16,
                                    shape.total // 16, count,
                                    ns * count, float(ns) * ns * count))  # fmt: skip
        return rows, 0

    def bucket_misses(self) -> list[BucketMiss]:
        return self.misses

    def enable_graph(self, index: int, on: bool) -> None:
        self.on[index] = on
        self.switched.append((index, on))
        # Whatever is switched in whatever order: what one could run, one can run.
        self.take_step_shapes()

    def release_graph(self, index: int) -> None:
        assert not self.on[index]
        self.released.append(index)


@dataclass
class Shop:
    """Compiles at once."""

    owner: Owner | None = None
    compiled: list[tuple[Bucket, ...]] = field(default_factory=list)
    published: list[tuple[Bucket, ...]] = field(default_factory=list)
    error: str = ""
    ended: bool = False

    def add(self, buckets: Sequence[Bucket]) -> tuple[Path, float] | None:
        if self.error:
            raise RuntimeError(self.error)
        if self.ended:
            return None
        self.compiled.append(tuple(buckets))
        return Path("/side"), 1.5

    def publish(self, buckets: Sequence[Bucket]) -> float | None:
        self.published.append(tuple(buckets))
        return 0.5

    def end(self) -> None:
        self.ended = True

    def close(self) -> None:
        self.end()


class Owner:
    def __init__(self, *more: Bucket) -> None:
        self.path = Path("/artifact")
        self.graphs = [graph(bucket) for bucket in (PROMPT, LARGE, *more)]
        self.engine = Engine(self.graphs, dict.fromkeys(range(len(self.graphs)), True))
        self.artifact: Any = SimpleNamespace(info=SimpleNamespace(block_size=16))
        self.max_num_seqs = 8
        self.shop = Shop()
        self.refuses = ""

    def call_between_steps(self, work: Callable[[], None]) -> None:
        work()

    def take_graphs(self, path: Path) -> range:
        if self.refuses:
            raise LlmcError(1, self.refuses)
        before = len(self.graphs)
        self.graphs.extend(graph(bucket) for bucket in self.shop.compiled[-1])
        for index in range(before, len(self.graphs)):
            self.engine.on[index] = False
        return range(before, len(self.graphs))


class AtOnce(Executor):
    """Runs what it is given before it returns."""

    def submit(self, work: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(work(*args, **kwargs))
        except Exception as error:  # belongs to the future
            future.set_exception(error)
        return future


class World:
    """A clock that a test moves on, a replanner that looks once a second, and what it said."""

    def __init__(self, owner: Owner, mode: str = "auto", retired: RetiredBuckets | None = None, **options: Any) -> None:
        self.now_s, self.owner, self.said = 0.0, owner, list[str]()
        some: dict[str, Any] = {"policy": EAGER, "interval_s": 10.0, "window_s": 2.0, "trial_s": 60.0,
                                "backoff_s": 30.0, "least_trial_steps": 20, "least_windows": 2,
                                "most_graphs": 4}  # fmt: skip
        self.replanner = Replanner(
            owner, ReplanOptions(mode=mode, **{**some, **options}),  # type: ignore[arg-type]
            tell=self.said.append, clock=lambda: self.now_s, facts=LadderFacts(LIMITS, None, {}, "computed"),
            workshop=owner.shop if mode == "auto" else None, pool=AtOnce(),  # type: ignore[arg-type]
            retired=retired,
        )  # fmt: skip

    def run(self, seconds: int) -> None:
        for _ in range(seconds):
            self.now_s += 1
            self.replanner.tick()

    def kinds(self) -> list[str]:
        return [one.kind for one in self.replanner.decisions.last()]


def test_totals_are_rounded_up_but_hide_no_padding() -> None:
    """Three sequences of 5 blocks are 15 blocks, which is no quarter of an octave; 14 blocks are."""
    longest = Bucket("decode", 4, 128)
    for blocks, total in ((15, 240), (14, 224), (9, 160)):
        steps = EngineSteps("decode", 0, 3, 3, 3, 5, blocks, 2, 100, 1e4)
        engine = SimpleNamespace(take_step_shapes=lambda steps=steps: ([steps], 0), bucket_misses=list)
        ((ran,), missed) = StepReader(engine, [graph(longest)], 16).read()
        assert (ran.shape.total, missed) == (total, [])
        assert LIMITS.padding(longest, ran.shape) == 4 * 128 - total


def test_suggest_tells_and_never_acts() -> None:
    owner = Owner()
    owner.engine.load = [(2, 64, 50)]
    world = World(owner, "suggest")
    world.run(35)
    assert world.kinds() == ["proposed"]  # said once, however often it is planned
    assert world.said == [world.replanner.decisions.last()[0].line()]
    assert "add decode:2x64" in world.said[0]
    assert owner.engine.switched == []
    state = world.replanner.state(steps=True)
    assert state["proposal"]["changes"][0]["bucket"] == "decode:2x64"
    assert state["num_shapes"] == 1
    assert state["steps"][0] == state["top_shapes"][0]
    assert state["steps"][0]["bucket"] == "decode:8x256"
    assert world.replanner.summary()["line"] == state["proposal"]["line"]


def test_auto_tries_a_bucket_by_turns_and_keeps_what_pays() -> None:
    owner = Owner()
    owner.engine.load = [(2, 64, 50)]
    world = World(owner)
    world.run(20)
    assert world.kinds() == ["proposed", "compiled", "joined", "kept", "published"]
    assert owner.engine.on == {0: True, 1: True, 2: True}
    # With it, without it, with it: the load of both is the same.
    assert owner.engine.switched[:3] == [(2, True), (2, False), (2, True)]
    assert owner.shop.published == owner.shop.compiled == [(Bucket("decode", 2, 64),)]
    kept = world.replanner.decisions.last()[3]
    assert kept.figures["padding_saving"] > 0.5
    assert kept.figures["steps_on"] == kept.figures["steps_off"] > 20
    assert world.replanner.decisions.counts()["kept"] == 1
    world.run(40)
    assert world.kinds().count("compiled") == 1  # there is nothing more to gain
    state = world.replanner.state()
    assert state["on"] == ["prefill:1x256", "decode:8x256", "decode:2x64"]
    assert state["off"] == []


def test_auto_tries_totals_of_contexts_and_retires_what_they_cover() -> None:
    """One context of 256 tokens among seven of a block, then all as long as the longest."""
    owner = Owner()
    owner.engine.load = [(8, 256, 50, 256 + 7 * 16)]
    world = World(owner, most_graphs=1)
    world.run(30)
    added = Bucket("decode", 8, 384, total=True)
    assert world.kinds()[:5] == ["proposed", "compiled", "joined", "kept", "published"]
    assert owner.shop.published == [(added,)]
    assert world.replanner.state()["contexts"]["suits"] == "total"
    assert "81% of sequences × longest context belongs to no sequence" in world.replanner.summary()["contexts"]["line"]
    # Steps that it does not hold want another one, and there is room for no more graphs.
    owner.engine.load = [(8, 256, 50, 1024)]
    world.run(120)
    state = world.replanner.state()
    assert "decode:8x1024total" in state["on"]
    assert str(added) in state["off"]
    assert all(
        on == (str(g.bucket) in state["on"]) for g, on in zip(owner.graphs, owner.engine.on.values(), strict=True)
    )


def test_retired_totals_stay_off_only_beside_what_covers_them() -> None:
    large, small = Bucket("decode", 8, 2048, total=True), Bucket("decode", 8, 384, total=True)
    assert spared([small], [large], LIMITS) == {small}
    assert spared([large], [LARGE], LIMITS) == {large}
    assert spared([LARGE], [small], LIMITS) == frozenset()
    assert spared([large, LARGE], [small], LIMITS) in ({large}, {LARGE})


def test_what_does_not_pay_is_reverted_and_waits_ever_longer() -> None:
    owner = Owner()
    owner.engine.load = [(2, 64, 50)]
    owner.engine.seconds = lambda bucket: 2e-3 if bucket.batch == 2 else 1e-3
    world = World(owner)
    reverted: list[float] = []
    for _ in range(400):
        before = world.kinds().count("reverted")
        world.run(1)
        if world.kinds().count("reverted") > before:
            reverted.append(world.now_s)
    assert len(reverted) >= 3
    gaps = [later - earlier for earlier, later in itertools.pairwise(reverted)]
    assert gaps == sorted(gaps)
    assert gaps[-1] > 1.5 * gaps[0]
    assert owner.engine.on[2] is False
    assert owner.shop.published == []
    assert "slower" in next(one for one in world.replanner.decisions.last() if one.kind == "reverted").reason
    # Compiled once: the second time it was only off.
    assert owner.shop.compiled.count((Bucket("decode", 2, 64),)) == 1
    assert world.replanner.state()["off"] == [str(Bucket(g.phase, g.batch, g.seq)) for g in owner.graphs[2:]]


def test_what_was_compiled_in_vain_is_published_when_it_stays_later() -> None:
    owner = Owner()
    owner.engine.load = [(2, 64, 50)]
    owner.engine.seconds = lambda bucket: 2e-3 if bucket.batch == 2 else 1e-3
    world = World(owner)
    world.run(30)
    assert world.kinds().count("reverted") >= 1
    owner.engine.seconds = lambda bucket: 1e-3
    world.run(200)
    kept = [one for one in world.replanner.decisions.last() if one.kind == "kept"]
    assert [one.added for one in kept] == owner.shop.published
    assert kept[0].added in owner.shop.compiled


def test_a_full_ladder_retires_and_every_step_keeps_a_bucket() -> None:
    unused = Bucket("decode", 6, 128)
    owner = Owner(unused)
    owner.engine.load = [(2, 64, 50), (8, 256, 1)]
    world = World(owner, most_graphs=0)
    world.run(20)
    assert owner.engine.on == {0: True, 1: True, 2: False, 3: True}
    assert world.replanner.state()["off"] == [str(unused)]
    assert owner.engine.released == [2]
    (kept,) = (one for one in world.replanner.decisions.last() if one.kind == "kept")
    assert (kept.added, kept.retired) == ((Bucket("decode", 2, 64),), (unused,))


def test_what_is_retired_stays_so_at_the_next_start(tmp_path: Path) -> None:
    unused, retired = Bucket("decode", 6, 128), RetiredBuckets.beside(tmp_path / "a.llmc")
    owner = Owner(unused)
    owner.engine.load = [(2, 64, 50), (8, 256, 1)]
    World(owner, retired=retired, most_graphs=0).run(20)
    assert retired.path == tmp_path / "a.llmc.retired.json"
    assert retired.read() == {unused}

    again = Owner(unused, Bucket("decode", 2, 64))
    again.engine.load = [(6, 128, 50)]
    world = World(again, retired=retired, most_graphs=1)
    world.run(1)
    assert again.engine.on == {0: True, 1: True, 2: False, 3: True}
    assert again.engine.released == [2]
    assert "a.llmc.retired.json says" in world.said[0]
    world.run(30)  # now that its steps come, a trial takes it back
    assert again.engine.on[2]
    assert not retired.path.exists()

    for mode in ("suggest", "auto"):
        retired.write([unused, LARGE])
        other = Owner(unused)
        world = World(other, mode, retired=retired)
        world.run(1)
        # No other bucket holds what the large one does.
        assert other.engine.on == {0: True, 1: True, 2: mode == "suggest"}
    for damaged in ("", "[]", '{"kind": "llmc retired buckets", "version": 1, "retired": ["decode"]}'):
        retired.path.write_text(damaged)
        assert retired.read() == frozenset()


def test_a_trial_without_traffic_ends_as_it_began() -> None:
    owner = Owner()
    owner.engine.load = [(2, 64, 50)]
    world = World(owner)
    world.run(9)
    assert world.replanner.state()["trial"] is None
    world.run(1)
    assert world.replanner.state()["trial"]["added"] == ["decode:2x64"]
    owner.engine.load = []
    world.run(60)
    assert world.kinds()[-1] == "reverted"
    assert world.replanner.state()["trial"] is None
    assert owner.engine.on[2] is False


@pytest.mark.parametrize("where", ["compiler", "engine"])
def test_failures_are_told_and_not_repeated_at_once(where: str) -> None:
    owner = Owner()
    owner.engine.load = [(2, 64, 50)]
    if where == "compiler":
        owner.shop.error = "no space\nleft"
    else:
        owner.refuses = "This device takes no graphs once it was made."
    world = World(owner)
    world.run(25)
    failed = [one for one in world.replanner.decisions.last() if one.kind == "failed"]
    assert failed
    assert len({one.added for one in failed}) == len(failed)  # each bucket once
    assert "\n" not in failed[0].reason
    assert owner.engine.switched == []
    assert world.replanner.state()["blocked"]


def test_nothing_is_switched_before_the_warm_up_is_done() -> None:
    owner = Owner()
    owner.engine.load = [(2, 64, 50)]
    world = World(owner)
    world.replanner._may_act = lambda: False
    world.run(30)
    assert world.kinds() == ["proposed"]


def test_steps_are_watched_while_the_compiler_works() -> None:
    owner = Owner()
    owner.engine.load = [(2, 64, 50)]
    world = World(owner)
    later: Future[Any] = Future()
    world.replanner._changes._pool = SimpleNamespace(submit=lambda *_: later)  # type: ignore[assignment]
    world.run(30)
    state = world.replanner.state()
    assert state["compiling"] == ["decode:2x64"]
    assert state["num_steps"] > 1400
    assert world.kinds() == ["proposed"]
    later.set_exception(OSError("no space left"))
    world.run(1)
    assert world.kinds() == ["proposed", "failed"]
    assert world.replanner.state()["compiling"] == []


def test_split_steps_are_seen_and_planned_for() -> None:
    owner = Owner()
    owner.engine.load = [(2, 64, 5)]
    miss = BucketMiss("decode", 3, 3, 4, 40, wanted=Bucket("decode", 3, 64))
    owner.engine.misses = [miss, replace(miss, graph=0)]
    world = World(owner, "suggest")
    world.run(3)
    rows = world.replanner.state(steps=True)["steps"]
    assert [(row["bucket"], row["sequences"]) for row in rows] == [("decode:8x256", 2), (None, 3)]
    assert rows[1]["steps"] == pytest.approx(40, rel=0.01)


def test_the_thread_looks_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    owner = Owner()
    looked = threading.Event()

    def fail() -> tuple[list[EngineSteps], int]:
        looked.set()
        raise OSError("the disk is gone")

    owner.engine.take_step_shapes = fail  # type: ignore[method-assign]
    monkeypatch.setattr("llmc.runtime.replan.replanner.LOOK_S", 0.001)
    world = World(owner)
    world.replanner.start()
    assert looked.wait(60)
    world.replanner.close()
    world.replanner.close()
    assert world.kinds()[0] == "failed"
    assert owner.shop.ended
    assert "llmc-replan" not in [thread.name for thread in threading.enumerate()]


def test_decisions_are_bounded_and_counted() -> None:
    log = DecisionLog()
    for n in range(MAX_DECISIONS + 5):
        log.note("failed", f"for the {n}th time", [LARGE])
    assert len(log.last()) == MAX_DECISIONS
    assert log.counts()["failed"] == MAX_DECISIONS + 5
    assert log.last()[-1].line() == f"replan: failed +decode:8x256: for the {MAX_DECISIONS + 4}th time"


def test_metrics() -> None:
    owner = Owner()
    owner.engine.load = [(2, 64, 50)]
    world = World(owner, "suggest")
    world.run(12)
    text = exposed(world)
    assert 'llmc_replan_decisions_total{kind="proposed"} 1.0' in text
    assert "llmc_replan_proposed_additions 1.0" in text
    assert 'llmc_replan_shape_steps{bucket="decode:8x256",context="64",phase="decode",sequences="2",tokens="2"}' in text


def exposed(world: World) -> str:
    registry = CollectorRegistry()
    registry.register(ReplanCollector(world.replanner.state))
    return generate_latest(registry).decode()


def test_modes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [parse_mode(mode) for mode in ("off", "suggest")] == ["off", "suggest"]
    with pytest.raises(RequestError, match="'always' is unknown: use off, suggest, auto"):
        parse_mode("always")
    with pytest.raises(RequestError, match="leave one out"):
        parse_mode("auto", "background")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "tvm" else SimpleNamespace())
    with pytest.raises(ModelPathError, match="--replan auto compiles what it proposes, but tvm is not installed"):
        parse_mode("auto")
    with pytest.raises(RequestError, match="interval_s"):
        ReplanOptions(interval_s=0)
    with pytest.raises(RequestError, match="margin"):
        ReplanOptions(margin=1)
