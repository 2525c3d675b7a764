"""`llmc warmup`, the cost tables it leaves, and who reads them."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest

from llmc.buckets.bucket import Bucket
from llmc.buckets.cost_table import CostTable
from llmc.cli.main import EXIT_INTERRUPTED, EXIT_USAGE, main
from llmc.cli.options.warm_up import WarmOptions, WarmUpPlanner
from llmc.runtime.binding import Artifact, Engine
from llmc.runtime.warm_up import warm_up as warmup
from llmc.runtime.warm_up.budget import BudgetOptions
from llmc.runtime.warm_up.disturbance import Mark
from llmc.runtime.warm_up.measuring import Load, full_load
from llmc.runtime.warm_up.warm_up import WarmPlan

from support.artifacts import TinyArtifact


# What a replay takes by these tests' clock: a machine's own is no part of what they are about.
def ns_of(load: Load) -> int:
    return 50_000 + 1_000 * load.tokens + 10 * load.context


class Idle:
    """A machine on which nothing else runs."""

    def mark(self) -> Mark:
        return Mark(0.0, {})

    def waited_s(self, since: Mark) -> float:
        return 0.0

    def taken(self, since: Mark) -> float:
        return 0.0


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replays take what `ns_of` says, undisturbed."""
    real = Engine.warm_load

    def warm_load(self: Engine, graph: int, *load: int) -> int:
        assert real(self, graph, *load) > 0
        return ns_of(Load(*load))

    monkeypatch.setattr(Engine, "warm_load", warm_load)
    monkeypatch.setattr(warmup, "MachineWatch", Idle)


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, Load]]:
    """Every replay that engines are asked for, which they carry out."""
    seen: list[tuple[int, Load]] = []
    replay, walk = Engine.warm_load, Engine.walk_graph

    def warm_load(self: Engine, graph: int, *load: int) -> int:
        seen.append((graph, Load(*load)))
        ns = replay(self, graph, *load)
        assert ns > 0
        return ns

    def walk_graph(self: Engine, graph: int) -> int:
        seen.append((graph, Load(0, 0, 0)))
        return walk(self, graph)

    monkeypatch.setattr(Engine, "warm_load", warm_load)
    monkeypatch.setattr(Engine, "walk_graph", walk_graph)
    return seen


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LLMC_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def table_in(cache: Path) -> CostTable:
    (path,) = (cache / "costs").iterdir()
    return CostTable.read(path)


def buckets_of(artifact: Path) -> set[Bucket]:
    return {Bucket.parse(name) for name in json.loads((artifact / "manifest.json").read_text())["buckets"]}


def test_it_replays_and_measures_every_graph(
    tiny_artifact: TinyArtifact, cache: Path, replays: list[tuple[int, Load]], capsys: pytest.CaptureFixture[str]
) -> None:
    artifact = tiny_artifact.artifact
    assert main(["warmup", str(artifact), "--threads", "1", "--seconds", "0.001", "--json"]) == 0
    captured = capsys.readouterr()
    told = json.loads(captured.out)
    with Artifact(artifact) as opened:
        info, graphs = opened.info, opened.graphs()
    assert {graph for graph, _ in replays} == set(range(len(graphs)))
    for index, graph in enumerate(graphs):
        assert (index, full_load(graph, info.block_size, info.max_model_len)) in replays
    table = table_in(cache)
    assert table.buckets == set(table.full()) == buckets_of(artifact)
    assert table.padding == "skipped"
    assert table.machine["threads"] == "1"
    assert told["measured"] == told["graphs"] == len(graphs)
    assert told["costs"] == json.loads(table.to_json())["costs"]
    assert len([line for line in captured.err.splitlines() if line.startswith("[warm-up]")]) == len(graphs)


def test_costs_that_cannot_be_kept_are_not_measured(
    tiny_artifact: TinyArtifact, tmp_path: Path, replays: list[tuple[int, Load]], capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "costs").write_text("no folder")
    assert main(["warmup", str(tiny_artifact.artifact), "--threads", "1", "--cache-dir", str(tmp_path)]) == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith(f"llmc: error: cannot write cost table {tmp_path}/costs/"), last
    assert last.endswith("; free some space, or set LLMC_CACHE_DIR to a writable directory")
    assert replays == []


def test_a_model_that_gives_vectors(
    embedder: tuple[Path, Path], cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, artifact = embedder
    assert main(["warmup", str(artifact), "--threads", "1", "--seconds", "0"]) == 0
    table = table_in(cache)
    assert table.buckets == buckets_of(artifact)
    assert "4 of them measured" in capsys.readouterr().out


def test_what_is_known_is_not_measured_again(
    tiny_artifact: TinyArtifact, cache: Path, replays: list[tuple[int, Load]], capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["warmup", str(tiny_artifact.artifact), "--threads", "1", "--seconds", "0"]
    num_graphs = len(buckets_of(tiny_artifact.artifact))
    assert main(command) == 0
    first = table_in(cache)
    replays.clear()
    assert main(command) == 0
    assert sorted(graph for graph, _ in replays) == list(range(num_graphs)), "each is replayed once"
    assert table_in(cache) == first
    assert f"{num_graphs} graphs warm" in capsys.readouterr().out
    assert main([*command, "--again"]) == 0
    assert table_in(cache).buckets == first.buckets
    # Another count of threads is another table.
    assert main([*command[:2], "--threads", "2", "--seconds", "0"]) == 0
    assert len(list((cache / "costs").iterdir())) == 2


def test_interrupted_it_leaves_a_valid_table(
    tiny_artifact: TinyArtifact, cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    artifact = tiny_artifact.artifact
    real = Engine.warm_load
    seen: list[int] = []

    def interrupted(self: Engine, graph: int, *load: int) -> int:
        seen.append(graph)
        if len(set(seen)) == 4:
            raise KeyboardInterrupt
        return real(self, graph, *load)

    command = ["warmup", str(artifact), "--threads", "1", "--seconds", "0"]
    with monkeypatch.context() as patch:
        patch.setattr(Engine, "warm_load", interrupted)
        assert main(command) == EXIT_INTERRUPTED
    table = table_in(cache)
    assert len(table.buckets) == 3
    assert main(command) == 0
    whole = table_in(cache)
    assert whole.buckets == buckets_of(artifact)
    assert set(table.costs) < set(whole.costs), "what was measured is kept"


def test_a_fine_tune_needs_no_measurement(tiny_artifact: TinyArtifact, cache: Path, tmp_path: Path) -> None:
    planner = WarmUpPlanner(tiny_artifact.artifact, WarmOptions())
    with Artifact(tiny_artifact.artifact) as opened:
        graphs = opened.graphs()
    assert planner.plan(graphs, 1).measure == frozenset(range(len(graphs)))
    assert main(["warmup", str(tiny_artifact.artifact), "--threads", "1", "--seconds", "0"]) == 0
    assert WarmUpPlanner(tiny_artifact.artifact, WarmOptions()).plan(graphs, 1).measure == frozenset()


def test_plans_take_the_measured_costs(
    tiny_artifact: TinyArtifact, cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.jsonl"
    rows = [{"arrival_s": i / 10, "prompt_tokens": 5 + i, "output_tokens": 3} for i in range(20)]
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    plan = ["buckets", "plan", "--trace", str(trace), "--max-model-len", "64", "--block-size", "16", "--json"]
    plan += ["--max-num-seqs", "2", "--max-graphs", "3", "--cost", "measured"]
    artifact = str(tiny_artifact.artifact)
    assert main([*plan, "--cost-table", artifact]) == 1
    assert f"run llmc warmup {artifact}" in capsys.readouterr().err
    assert main(["warmup", artifact, "--threads", "1", "--seconds", "0"]) == 0
    capsys.readouterr()
    assert main([*plan, "--cost-table", artifact]) == 0
    by_artifact = json.loads(capsys.readouterr().out)
    (path,) = (cache / "costs").iterdir()
    assert main([*plan, "--cost-table", str(path)]) == 0
    assert json.loads(capsys.readouterr().out) == by_artifact
    assert by_artifact["unit"] == "s"
    assert by_artifact["confidence"] == 0.9
    # Of the trace alone, whose 20 requests are few.
    assert [text for text in by_artifact["warnings"] if "too few to plan by" not in text] == []
    for one in (*by_artifact["phases"]["decode"]["ladders"], *by_artifact["simulated"]["ladders"]):
        low, high = one["cost_interval"]
        assert low < one["cost"] < high
    plan.remove("--json")
    assert main([*plan, "--cost-table", artifact]) == 0
    shown = capsys.readouterr().out
    assert "below a cost: how far off it may lie, in 90% of cases" in shown
    assert re.search(r" -\d+% \+\d+%", shown)
    assert "…" not in shown, "the columns fit"
    plan.append("--json")
    # Its short form tells of full buckets only: shorter ones are worth their time then.
    short = tmp_path / "short.json"
    short.write_text(json.dumps({"prefill:1x16": 0.001, "prefill:1x64": 0.004, "decode:2x64": 0.001}))
    assert main([*plan, "--cost-table", str(short)]) == 0
    by_buckets = json.loads(capsys.readouterr().out)
    assert by_buckets["confidence"] is None
    assert len(by_buckets["ladder"]["prefill"]) > len(by_artifact["ladder"]["prefill"]) == 1


class Busy(Idle):
    """A machine that others keep busy for the first so many stretches that somebody asks about."""

    left = 0

    def taken(self, since: Mark) -> float:
        Busy.left -= 1
        return 0.5 if Busy.left >= 0 else 0.0


def test_what_was_measured_under_load_is_measured_again(
    tiny_artifact: TinyArtifact, cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["warmup", str(tiny_artifact.artifact), "--threads", "1", "--seconds", "0", "--json"]
    monkeypatch.setattr(warmup, "MachineWatch", Busy)
    Busy.left = 1 << 30
    assert main(command) == 0
    captured = capsys.readouterr()
    costs = table_in(cache).costs
    assert all(cost.disturbed == 0.5 for cost in costs)
    assert "are measured again" in captured.err
    (told,) = json.loads(captured.out)["warnings"]
    assert told.startswith(f"{len(costs)} of {len(costs)} costs were measured while other programs took up to 50%")
    assert f"warning: {told}" in captured.err
    # The next warm-up measures them again; the first two loads are disturbed once more, and are measured at its end.
    Busy.left = 2
    assert main(command) == 0
    assert all(cost.disturbed == 0 for cost in table_in(cache).costs)
    assert json.loads(capsys.readouterr().out)["warnings"] == []


def test_costs_that_fall_are_told_and_measured_again(
    tiny_artifact: TinyArtifact, cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["warmup", str(tiny_artifact.artifact), "--threads", "1", "--seconds", "0", "--json"]
    smallest = min(bucket for bucket in buckets_of(tiny_artifact.artifact) if bucket.phase == "decode")
    with monkeypatch.context() as patch:
        slow = Engine.warm_load

        def warm_load(self: Engine, graph: int, *load: int) -> int:
            with Artifact(tiny_artifact.artifact) as artifact:
                one = artifact.graphs()[graph]
            return slow(self, graph, *load) * (90 if Bucket(one.phase, one.batch, one.seq) == smallest else 1)

        patch.setattr(Engine, "warm_load", warm_load)
        assert main(command) == 0
    captured = capsys.readouterr()
    (told,) = json.loads(captured.out)["warnings"]
    assert str(smallest) in told
    assert "llmc warmup --again" in told
    assert "are measured again" in captured.err
    assert main(command) == 0
    assert json.loads(capsys.readouterr().out)["warnings"] == []


def plan_of(artifact: Path, **options: Any) -> WarmPlan:
    with Artifact(artifact) as opened:
        return WarmUpPlanner(artifact, WarmOptions(**options)).plan(opened.graphs(), 1)


def test_a_server_measures_by_itself_only_what_is_quick(tiny_artifact: TinyArtifact, cache: Path) -> None:
    artifact = tiny_artifact.artifact
    plan = plan_of(artifact, measure=None)
    assert plan.measure == frozenset(plan.order)
    assert plan.measure_within_s == 2.0
    assert plan_of(artifact, measure=True).measure_within_s is None
    assert plan_of(artifact, measure=False).measure == frozenset()
    assert plan_of(artifact, measure=None, ready_after="hot").measure == frozenset()
    skipped = plan_of(artifact, measure=None, skip=True)
    assert (skipped.skipped, skipped.measure) == (True, frozenset())


def test_a_server_keeps_what_it_measured_beside_its_start(tiny_artifact: TinyArtifact, cache: Path) -> None:
    artifact = tiny_artifact.artifact
    planner = WarmUpPlanner(artifact, WarmOptions(measure=None))
    with Artifact(artifact) as opened, Engine(opened, num_threads=1) as engine:
        info, graphs = opened.info, opened.graphs()
        plan = planner.plan(graphs, 1)
        warming = warmup.WarmUp(engine, graphs, plan, block_size=info.block_size, max_model_len=info.max_model_len)
        warming.run(planner.take)
    planner.flush()
    table = table_in(cache)
    assert table.buckets == buckets_of(artifact)
    assert all(cost.repeats == 3 for cost in table.costs)
    assert plan_of(artifact, measure=None).measure == frozenset()


def test_the_log_lists_buckets_and_warm_graphs(
    tiny_artifact: TinyArtifact, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["warmup", str(tiny_artifact.artifact), "--threads", "1", "--seconds", "0"]
    assert main(command) == 0
    lines = capsys.readouterr().err.splitlines()
    buckets = buckets_of(tiny_artifact.artifact)
    for phase in ("prefill", "decode"):
        mine = [bucket for bucket in buckets if bucket.phase == phase]
        (listed,) = (line for line in lines if line.startswith(f"llmc: {phase} buckets: {len(mine)} ("))
        (warm,) = (line for line in lines if line.startswith(f"llmc: {phase} graphs warm: {len(mine)}, "))
        assert f" {len(mine)} replayed and 0 walked in " in warm
        for line in (listed, warm):
            batches = dict(word.split("x") for word in line.split() if word[0].isdigit() and "x" in word)
            assert sum(len(seqs.split(",")) for seqs in batches.values()) == len(mine)
    # With no time for replays one of each kind is replayed and the others are walked.
    assert main([*command, "--warmup-seconds", "0"]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert any(" walked in " in line for line in lines)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    rows = [{"arrival_s": i / 10, "prompt_tokens": 5 + i, "output_tokens": 3} for i in range(20)]
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def predictions(artifact: str, trace: Path) -> dict[str, list[str]]:
    """Every command that predicts by measured costs."""
    limits = ["--max-model-len", "64", "--block-size", "16", "--max-num-seqs", "2", "--max-graphs", "3"]
    return {
        "plan": ["buckets", "plan", "--trace", str(trace), "--cost-table", artifact, *limits, "--json"],
        "simulate": ["buckets", "simulate", "--trace", str(trace), "--buckets", artifact, "--json"],
        "waste": ["inspect", artifact, "--waste", str(trace), "--format", "json"],
    }


def test_predictions_are_intervals(
    tiny_artifact: TinyArtifact, cache: Path, trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    artifact = str(tiny_artifact.artifact)
    assert main(["warmup", artifact, "--threads", "1", "--seconds", "0"]) == 0
    capsys.readouterr()
    commands = predictions(artifact, trace)
    assert main(commands["simulate"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["confidence"] == 0.9
    (one,) = told["ladders"]
    assert set(one["intervals"]) <= set(one)
    assert {"replay_s", "busy_s", "ttft_p50_s", "latency_p99_s", "padding_s", "warm_up_s"} <= set(one["intervals"])
    for name, (low, high) in one["intervals"].items():
        assert low <= one[name] <= high, name
    assert one["intervals"]["replay_s"][0] < one["replay_s"] < one["intervals"]["replay_s"][1]
    assert main(commands["simulate"][:-1]) == 0
    assert re.search(r"\([\d.]+ .s to [\d.]+ .s\)", " ".join(capsys.readouterr().out.split()))
    assert main(commands["waste"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["confidence"] == 0.9
    for row in told["buckets"]:
        assert row["seconds_interval"][0] <= row["seconds"] <= row["seconds_interval"][1]
        assert row["padding_s_interval"][0] <= row["padding_s"] <= row["padding_s_interval"][1]
    assert main(commands["waste"][:-2]) == 0
    assert "in brackets: between which ends a time lies in 90% of cases" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["plan", "simulate", "waste"])
def test_who_reads_costs_refuses_those_that_fall_and_tells_of_those_under_load(
    tiny_artifact: TinyArtifact, cache: Path, trace: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    artifact = str(tiny_artifact.artifact)
    assert main(["warmup", artifact, "--threads", "1", "--seconds", "0"]) == 0
    (path,) = (cache / "costs").iterdir()
    table = CostTable.read(path)
    capsys.readouterr()
    loaded = dataclasses.replace(table.costs[0], disturbed=0.37)
    dataclasses.replace(table, costs=(loaded, *table.costs[1:])).write(path)
    asked = predictions(artifact, trace)[command]
    assert main(asked) == 0
    warnings = json.loads(capsys.readouterr().out)["warnings"]
    (told,) = (text for text in warnings if "too few to plan by" not in text)
    assert told.startswith(f"1 of {len(table.costs)} costs were measured while other programs took up to 37%")
    decode = [cost for cost in table.costs if cost.bucket.phase == "decode"]
    slow = dataclasses.replace(decode[0], seconds=0.022)
    table.with_costs([slow]).write(path)
    assert main(asked) == 1
    said = capsys.readouterr().err
    assert len(said.splitlines()) == 1
    assert f"{slow.bucket} (" in said
    assert "took 22 ms and the larger decode:" in said
    assert "llmc warmup --again" in said


@pytest.mark.parametrize(
    ("command", "arguments", "says"),
    [
        ("warmup", ["--order", "decode=best"], "warm-up order 'best' is unknown"),
        ("warmup", ["--order", "prefill=traffic"], "needs a trace"),
        ("serve", ["--skip-warmup", "--ready-after", "hot"], "--skip-warmup leaves no graph to wait for"),
        ("serve", ["--skip-warmup", "--measure-costs"], "exclude each other"),
        ("warmup", ["--order", "best"], "warm-up order 'best' is unknown"),
        ("warmup", ["--order", "traffic"], "needs a trace"),
        ("serve", ["--ready-after", "soon"], "--ready-after 'soon' is unknown"),
        ("serve", ["--graph-prompt-ratio", "0.5"], "graph-prompt-ratio 0.5 divides a budget"),
        ("serve", ["--graph-reserved-memory", "0.5"], "graph-reserved-memory 0.5 divides a budget"),
        ("serve", ["--memory-utilization", "1.1"], "memory-utilization 1.1 is out of range"),
        ("serve", ["--memory-utilization", "0"], "memory-utilization 0 is out of range"),
        ("serve", ["--warm-order", "traffic"], "needs a trace"),
    ],
)
def test_bad_flags(
    tiny_artifact: TinyArtifact, command: str, arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, str(tiny_artifact.artifact), *arguments]) == EXIT_USAGE
    assert says in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--memory-utilization", "1e-9"], "memory-utilization 1e-09 of"),
        (["--memory-utilization", "0.5", "--graph-reserved-memory", "1e-9"], "use at least"),
        (["--memory-utilization", "0.5", "--kv-bytes", "900TiB"], "kv-bytes 989560464998400 is more than the"),
        (["--warm-trace", "/nowhere/trace.jsonl"], "/nowhere/trace.jsonl"),
    ],
)
def test_budgets_and_traces_that_cannot_be(
    tiny_artifact: TinyArtifact, arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", str(tiny_artifact.artifact), "--port", "0", *arguments]) == 1
    assert says in capsys.readouterr().err


def test_a_budget_reaches_the_engine(english_artifact: Path, capsys: pytest.CaptureFixture[str]) -> None:
    budget = BudgetOptions(0.5, 0.9, 0.3, kv_bytes=8 << 20)
    planner = WarmUpPlanner(english_artifact, WarmOptions(budget=budget, measure=False))
    assert planner.budget is not None
    assert planner.budget.kv_bytes == 8 << 20
    steps = [line for line in capsys.readouterr().err.splitlines() if " buckets: " not in line]
    assert all(line.startswith("llmc: memory: ") for line in steps)
    for word in ("memory-utilization", "weights", "graph-reserved-memory", "decode graphs", "KV cache"):
        assert any(word in line for line in steps)
