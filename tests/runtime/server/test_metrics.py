"""Metrics: what /metrics says is true, documented, and all that the dashboard asks for."""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import json
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse

from llmc.buckets.bucket import Bucket
from llmc.runtime.binding.statistics import BucketMiss, EngineStats, GraphStats
from llmc.runtime.images.tower import TowerStats
from llmc.runtime.router.metrics import RouterMetrics
from llmc.runtime.server.hand_over import HandOverCounts
from llmc.runtime.server.hand_over_metrics import HandOverCollector
from llmc.runtime.server.image_metrics import ImageCollector
from llmc.runtime.server.metrics import FINISH_REASONS, EngineProbe, Latencies, ServerMetrics
from llmc.runtime.server.replan_metrics import ReplanCollector
from llmc.runtime.server.request_memory import MemoryLimits, RequestMemory
from llmc.runtime.server.requests import RequestRecord
from llmc.runtime.warm_up.warm_up import WarmCounts

from support.artifacts import TinyArtifact
from support.paths import ROOT

RULES = ROOT / "deploy/prometheus/llmc.rules.yml"
MS = 1_000_000
NO_COUNTERS: Mapping[str, int] = {}


@dataclasses.dataclass(frozen=True)
class Graph:
    phase: str
    batch: int
    seq: int

    @property
    def bucket(self) -> Bucket:
        return Bucket(self.phase, self.batch, self.seq)


GRAPHS = [Graph("prefill", 1, 128), Graph("decode", 4, 512)]


def stats(device: Mapping[str, int] = NO_COUNTERS, **values: int) -> EngineStats:
    counts = {field.name: 0 for field in dataclasses.fields(EngineStats) if field.name != "device"}
    return EngineStats(**{**counts, **values}, device=device)


def metrics_of(device: Mapping[str, int] = NO_COUNTERS, **values: int) -> ServerMetrics:
    probe = EngineProbe(
        stats=lambda: stats(device, **values),
        graph_stats=lambda: [GraphStats(0, 0, 0, 0), GraphStats(10, 30, 10, 8_000_000_000)],
        bucket_misses=lambda: [BucketMiss("decode", 5, 5, 40, 7, wanted=Bucket("decode", 5, 640))],
        graphs=GRAPHS,  # type: ignore[arg-type]
        warm_counts=lambda: WarmCounts(1, 1),
        memory=RequestMemory(MemoryLimits(1 << 30, 1 << 28)),
        adapters=lambda: {"medical": 3},
        evictions=lambda: {-1: 2, 7: 1},
        failed_steps=lambda: 2,
    )
    return ServerMetrics(probe, {"version": "1.2", "model": "tiny"})


def record(**values: Any) -> RequestRecord:
    """A request of 9 tokens: 2 ms in the queue, the first token after 10 ms, 8 more in 80 ms."""
    base = RequestRecord("r", 100 * MS, 102 * MS, 110 * MS, 190 * MS, 20, 16, 9, ("stop",), None, (10 * MS,) * 8)
    return dataclasses.replace(base, **values)


def values_of(metrics: ServerMetrics) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """{(name, sorted labels): value} of everything exposed."""
    families = parse(metrics.render()[0].decode())
    return {(s.name, tuple(sorted(s.labels.items()))): s.value for family in families for s in family.samples}


def value(metrics: ServerMetrics, name: str, **labels: str) -> float:
    return values_of(metrics)[name, tuple(sorted(labels.items()))]


def full_name(family: Metric) -> str:
    return f"{family.name}_total" if family.type == "counter" else family.name


def exposed() -> dict[str, Metric]:
    metrics = metrics_of()
    metrics.on_record(record())
    metrics.on_response("/v1/models", 200)
    row = {"phase": "decode", "sequences": 2, "tokens": 2, "context": 64, "bucket": None, "steps": 3.5}
    state = {"num_steps": 9.5, "num_shapes": 1, "off": [], "proposal": None, "trial": None, "lost_steps": 0,
             "counts": {"kept": 1}, "top_shapes": [row]}  # fmt: skip
    metrics.registry.register(ReplanCollector(lambda: state))
    metrics.registry.register(ImageCollector(TowerStats(), lambda: 0))
    metrics.registry.register(HandOverCollector(HandOverCounts(fallbacks=collections.Counter({"lost": 1}))))
    return {full_name(family): family for family in parse(metrics.render()[0].decode())}


def test_latencies_and_lengths_of_a_request() -> None:
    metrics = metrics_of()
    metrics.on_record(record())
    expected = {
        "llmc_request_queue_seconds": 0.002,
        "llmc_time_to_first_token_seconds": 0.010,
        "llmc_time_per_output_token_seconds": 0.010,
        "llmc_request_duration_seconds": 0.090,
        "llmc_request_prompt_tokens": 20,
        "llmc_request_output_tokens": 9,
    }
    for name, total in expected.items():
        assert value(metrics, f"{name}_count") == 1, name
        assert value(metrics, f"{name}_sum") == pytest.approx(total), name
    assert value(metrics, "llmc_inter_token_seconds_count") == 8
    assert value(metrics, "llmc_inter_token_seconds_sum") == pytest.approx(0.08)
    assert value(metrics, "llmc_inter_token_seconds_bucket", le="0.01") == 8
    assert value(metrics, "llmc_inter_token_seconds_bucket", le="0.0075") == 0
    assert value(metrics, "llmc_inter_token_seconds_bucket", le="+Inf") == 8
    assert value(metrics, "llmc_time_to_first_token_seconds_bucket", le="0.01") == 1
    assert value(metrics, "llmc_time_to_first_token_seconds_bucket", le="0.005") == 0


def test_a_stage_that_was_not_reached_is_not_observed() -> None:
    metrics = metrics_of()
    queued = record(first_scheduled_ns=0, first_token_ns=0, num_output_tokens=0, finish_reasons=("cancelled",))
    metrics.on_record(dataclasses.replace(queued, token_gaps_ns=()))
    for name in ("llmc_request_queue_seconds", "llmc_time_to_first_token_seconds", "llmc_inter_token_seconds"):
        assert value(metrics, f"{name}_count") == 0, name
    assert value(metrics, "llmc_time_per_output_token_seconds_count") == 0
    assert value(metrics, "llmc_request_duration_seconds_count") == 1
    assert value(metrics, "llmc_outputs_finished_total", finish_reason="cancelled") == 1


def test_time_per_token_counts_the_steps_of_continuations_that_advance_together() -> None:
    assert Latencies.of(record(num_output_tokens=18, finish_reasons=("stop", "length"))).tpot_s == pytest.approx(0.01)
    assert Latencies.of(record(num_output_tokens=1)).tpot_s is None


def test_every_finish_reason_is_there_before_it_happens() -> None:
    metrics = metrics_of()
    for reason in FINISH_REASONS:
        assert value(metrics, "llmc_outputs_finished_total", finish_reason=reason) == 0
    metrics.on_record(record(finish_reasons=("stop", "length", "stop")))
    assert value(metrics, "llmc_outputs_finished_total", finish_reason="stop") == 2
    assert value(metrics, "llmc_outputs_finished_total", finish_reason="length") == 1


def test_buckets_and_misses() -> None:
    metrics = metrics_of(num_bucket_misses=9)
    bucket = {"phase": "decode", "batch": "4", "seq": "512"}
    assert value(metrics, "llmc_bucket_replays_total", **bucket) == 10
    assert value(metrics, "llmc_bucket_tokens_total", **bucket) == 30
    assert value(metrics, "llmc_bucket_padding_tokens_total", **bucket) == 10
    assert value(metrics, "llmc_bucket_replay_seconds_total", **bucket) == 8
    assert value(metrics, "llmc_bucket_padding_seconds_total", **bucket) == 2
    unused = {"phase": "prefill", "batch": "1", "seq": "128"}
    assert value(metrics, "llmc_bucket_padding_seconds_total", **unused) == 0
    assert value(metrics, "llmc_bucket_misses_total") == 9
    shape = {"phase": "decode", "sequences": "5", "tokens": "5", "blocks": "40"}
    assert value(metrics, "llmc_bucket_misses_by_shape_total", **shape) == 7


def test_engine_counters() -> None:
    metrics = metrics_of(
        num_running=3, num_waiting=2, num_blocks=100, num_free_blocks=60, num_cached_blocks=70,
        num_steps=10, num_prefill_steps=4, num_mixed_steps=1, num_decode_steps=6, num_preemptions=5, prompt_tokens=200,
        num_evictions=4, num_promotions=1,
        output_tokens=90, prefix_query_tokens=150, prefix_hit_tokens=50, step_ns=10_000_000_000,
        schedule_ns=1_000_000_000, prepare_ns=1_000_000_000, replay_ns=5_000_000_000, sample_ns=2_000_000_000,
        decode_step_ns=3_000_000_000, max_request_tokens=48, num_speculative_steps=3, drafted_tokens=9,
        accepted_tokens=7, judged_tokens=8, num_ahead_steps=5, num_thrown_rows=2, mask_wait_ns=3_000_000_000,
        num_draft_blocks=50, num_free_draft_blocks=30, draft_ns=4_000_000_000,
        device={
            "threads": 4, "working_threads": 3, "thread_cuts": 6, "ranks": 2, "working_ranks": 2, "all_reduces": 8,
            "all_reduce_ns": 4_000_000_000, "all_reduce_hidden_ns": 2_000_000_000, "all_gathers": 1,
            "all_gather_ns": 1_000_000_000,
        },
    )  # fmt: skip
    expected = {
        "llmc_sequences_running": 3, "llmc_sequences_waiting": 2, "llmc_kv_blocks": 100, "llmc_kv_blocks_used": 40,
        "llmc_kv_blocks_cached": 70, "llmc_threads": 4, "llmc_graphs": 2, "llmc_graphs_warm": 2,
        "llmc_graphs_replayed": 1, "llmc_graphs_walked": 1, "llmc_graphs_launched": 0, "llmc_adapters": 1,
        "llmc_promotions_total": 1, "llmc_failed_steps_total": 2,
        "llmc_preemptions_total": 5, "llmc_prompt_tokens_total": 200, "llmc_generation_tokens_total": 90,
        "llmc_prefix_cache_query_tokens_total": 150, "llmc_prefix_cache_hit_tokens_total": 50,
        "llmc_decode_step_seconds_total": 3, "llmc_max_request_tokens": 48,
        "llmc_threads_working": 3, "llmc_thread_cuts_total": 6, "llmc_speculative_steps_total": 3,
        "llmc_drafted_tokens_total": 9, "llmc_accepted_tokens_total": 7,
        "llmc_judged_tokens_total": 8, "llmc_mask_wait_seconds_total": 3,
        "llmc_ahead_steps_total": 5, "llmc_thrown_rows_total": 2, "llmc_ranks": 2, "llmc_ranks_working": 2,
        "llmc_draft_kv_blocks": 50, "llmc_draft_kv_blocks_used": 20, "llmc_draft_seconds_total": 4,
    }  # fmt: skip
    assert {name: value(metrics, name) for name in expected} == expected
    parts = {"schedule": 1, "prepare": 1, "replay": 5, "sample": 2, "other": 1}
    assert {part: value(metrics, "llmc_step_seconds_total", part=part) for part in parts} == parts
    assert value(metrics, "llmc_steps_total", phase="prefill") == 3
    assert value(metrics, "llmc_steps_total", phase="mixed") == 1
    assert value(metrics, "llmc_steps_total", phase="decode") == 6
    assert value(metrics, "llmc_collectives_total", op="all_reduce") == 8
    assert value(metrics, "llmc_collective_seconds_total", op="all_reduce") == 4
    assert value(metrics, "llmc_collective_hidden_seconds_total", op="all_reduce") == 2
    evictions = {label: value(metrics, "llmc_evictions_total", priority=label) for label in ("-1", "7", "other")}
    assert evictions == {"-1": 2, "7": 1, "other": 1}
    assert value(metrics, "llmc_build_info", version="1.2", model="tiny") == 1


def test_counters_are_read_at_each_scrape() -> None:
    tokens = iter((1, 2))
    probe = EngineProbe(lambda: stats(output_tokens=next(tokens)), lambda: [], lambda: [], [], WarmCounts)
    metrics = ServerMetrics(probe, {})
    assert value(metrics, "llmc_generation_tokens_total") == 1
    assert value(metrics, "llmc_generation_tokens_total") == 2


def test_names_follow_the_conventions() -> None:
    for name, family in exposed().items():
        assert re.fullmatch(r"(llmc|process)_[a-z_]+", name)
        assert family.documentation, name
        assert (family.type == "counter") == name.endswith("_total"), name
        assert not re.search(r"_(ms|us|ns|milliseconds|percent)(_|$)", name), f"{name}: base units only"


def test_forms() -> None:
    metrics = metrics_of()
    metrics.on_response("/x", 200)
    text, plain_type = metrics.render()
    assert plain_type.startswith("text/plain; version=0.0.4")
    openmetrics, open_type = metrics.render("application/openmetrics-text; version=1.0.0")
    assert open_type.startswith("application/openmetrics-text")
    assert b"_created" not in text + openmetrics
    names = {family.name for family in parse_openmetrics(openmetrics.decode())}
    assert {"llmc_generation_tokens", "llmc_http_responses", "llmc_kv_blocks"} <= names


# ---- documentation and dashboard -----------------------------------------------------------------------------------

_ROW = re.compile(r"^\| `((?:llmc|process)_\w+)` \| (\w+) \|([^|]*)\|", re.MULTILINE)


def test_documentation_lists_every_metric_with_type_and_labels() -> None:
    documented = {
        name: (kind, frozenset(re.findall(r"`(\w+)`", labels)))
        for name, kind, labels in _ROW.findall((ROOT / "docs/observability.md").read_text(encoding="utf-8"))
    }
    actual = {
        name: (family.type, frozenset(label for s in family.samples for label in s.labels if label != "le"))
        for name, family in exposed().items()
    }
    assert documented == actual


def expressions(node: Any) -> Iterator[str]:
    """Every PromQL expression of a dashboard."""
    if isinstance(node, dict):
        for key, item in node.items():
            if key in ("expr", "query", "definition") and isinstance(item, str) and "(" in item:
                yield item
            else:
                yield from expressions(item)
    elif isinstance(node, list):
        for item in node:
            yield from expressions(item)


def test_dashboard_asks_only_for_what_is_there() -> None:
    dashboard = json.loads((ROOT / "deploy/grafana/llmc.json").read_text(encoding="utf-8"))
    families = exposed()
    series = {sample.name: set(sample.labels) for family in families.values() for sample in family.samples}
    asked = set()
    for expression in expressions(dashboard):
        for name in re.findall(r"\b(?:llmc|process)_\w+", expression):
            assert name in series, f"{name} in {expression!r} is no series of the server"
            asked.add(name.removesuffix("_bucket"))
        names = re.findall(r"\b((?:llmc|process)_\w+)", expression)
        known = set().union(*(series[name] for name in names)) | {"instance"}
        for labels in re.findall(r"by \(([^)]*)\)", expression):
            assert set(labels.replace(" ", "").split(",")) <= known, expression
        assert expression.count("(") == expression.count(")")
        assert expression.count("{") == expression.count("}")
    shown_elsewhere = {"llmc_scheduled_tokens_total", "llmc_padding_tokens_total", "llmc_collectives_total"}
    left_out = {name for name in families if name.startswith("llmc_")} - asked - shown_elsewhere
    assert not left_out, f"the dashboard shows nothing of {sorted(left_out)}"


def alert_rules() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"] for rule in group["rules"]]


def series_of_router() -> dict[str, set[str]]:
    """Labels by series, of counters and gauges that may have no value yet."""
    found: dict[str, set[str]] = {}
    for metric in RouterMetrics().registry.collect():
        of_replica = {"replica"} if metric.name.startswith("llmc_router_replica_") else set[str]()
        found[metric.name + ("_total" if metric.type == "counter" else "")] = of_replica
    return found


def test_alerts_ask_only_for_what_is_there_and_say_what_to_do() -> None:
    series = {sample.name: set(sample.labels) for family in exposed().values() for sample in family.samples}
    series |= series_of_router()
    rules = alert_rules()
    assert len({rule["alert"] for rule in rules}) == len(rules)
    flags = set(re.findall(r"^\| `(--[a-z-]+)", (ROOT / "docs/serving.md").read_text(encoding="utf-8"), re.MULTILINE))
    for rule in rules:
        asked = re.findall(r"\b(?:llmc|process)_\w+", rule["expr"])
        assert asked or rule["expr"].startswith("up{"), rule
        for name in asked:
            assert name in series, f"{name} of {rule['alert']} is no series of the server"
        for name, matched in re.findall(r"\b((?:llmc|process)_\w+)\{([^}]*)\}", rule["expr"]):
            assert set(re.findall(r"(\w+)[!=]", matched)) <= series[name] | {"job"}, rule
        assert rule["labels"]["severity"] in ("critical", "warning", "info")
        assert set(rule["annotations"]) == {"summary", "description"}
        told = set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"]))
        if "by (instance" not in rule["expr"]:
            assert told <= {"instance"} | set().union(*(series[name] for name in asked)), rule
        else:
            assert told == {"instance"}, rule
        assert set(re.findall(r"--[a-z-]+", rule["annotations"]["description"])) <= flags, rule


def test_dashboard_can_be_imported_anywhere() -> None:
    dashboard = json.loads((ROOT / "deploy/grafana/llmc.json").read_text(encoding="utf-8"))
    variables = {variable["name"] for variable in dashboard["templating"]["list"]}
    assert {"datasource", "instance"} <= variables
    ids: set[int] = set()
    places: list[dict[str, int]] = []
    for panel in dashboard["panels"]:
        assert panel["id"] not in ids
        ids.add(panel["id"])
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        for other in places:
            apart = (
                place["x"] >= other["x"] + other["w"]
                or other["x"] >= place["x"] + place["w"]
                or place["y"] >= other["y"] + other["h"]
                or other["y"] >= place["y"] + place["h"]
            )
            assert apart, f"{panel['title']} overlaps another panel"
        places.append(place)
        if panel["type"] != "row":
            assert panel["datasource"]["uid"] == "${datasource}", panel["title"]
            assert panel["targets"], panel["title"]
            assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"]), panel["title"]


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool, of the package prometheus, is not installed")
def test_prometheus_reads_metrics_and_queries(tmp_path: Path) -> None:
    linted = subprocess.run(["promtool", "check", "metrics"], input=metrics_of().render()[0], capture_output=True)
    assert (linted.returncode, linted.stdout, linted.stderr) == (0, b"", b"")
    dashboard = json.loads((ROOT / "deploy/grafana/llmc.json").read_text(encoding="utf-8"))
    asked = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    asked += re.findall(r"\| `((?:topk|rate)\(.*?)` \|$", (ROOT / "docs/observability.md").read_text(), re.MULTILINE)
    assert len(asked) > 40
    queries = [re.sub(r"\$__\w+", "5m", one).replace("$instance", ".*") for one in asked]
    rules = [{"record": f"rule:{index}", "expr": query} for index, query in enumerate(queries)]
    (tmp_path / "rules.yml").write_text(json.dumps({"groups": [{"name": "dashboard", "rules": rules}]}))
    checked = subprocess.run(["promtool", "check", "rules", tmp_path / "rules.yml"], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert f"{len(queries)} rules found" in checked.stdout
    checked = subprocess.run(["promtool", "check", "rules", RULES], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout + checked.stderr


# ---- with an engine --------------------------------------------------------------------------------------------------


def test_counters_of_a_running_engine_agree(tiny_artifact: TinyArtifact) -> None:
    from llmc.runtime.params import SamplingParams
    from llmc.runtime.server.async_engine import AsyncEngine
    from llmc.runtime.server.requests import EngineRequest

    engine = AsyncEngine(tiny_artifact.artifact, num_threads=1, pin_threads=False)
    probe = EngineProbe(engine.stats, engine.graph_stats, engine.bucket_misses, engine.graphs, WarmCounts)
    metrics = ServerMetrics(probe, {"model": "tiny"})
    engine.on_record.append(metrics.on_record)

    async def generate(index: int) -> None:
        params = SamplingParams(max_tokens=5 + index, temperature=0.0, ignore_eos=True)
        async for _ in engine.stream(EngineRequest(f"r{index}", tuple(range(3, 10 + index)), params)):
            pass

    async def main() -> None:
        await engine.start()
        await asyncio.gather(*(generate(index) for index in range(4)))
        await engine.drain(10.0)

    try:
        asyncio.run(main())
        values = values_of(metrics)
    finally:
        engine.close()
    total: dict[str, float] = {}
    for (name, _), one in values.items():
        total[name] = total.get(name, 0) + one
    assert total["llmc_request_output_tokens_sum"] == total["llmc_generation_tokens_total"] == 5 + 6 + 7 + 8
    assert total["llmc_request_prompt_tokens_sum"] == total["llmc_prompt_tokens_total"] == 7 + 8 + 9 + 10
    assert (
        total["llmc_outputs_finished_total"]
        == values["llmc_outputs_finished_total", (("finish_reason", "length"),)]
        == 4
    )
    assert total["llmc_inter_token_seconds_count"] == 26 - 4
    assert total["llmc_time_to_first_token_seconds_count"] == 4
    assert total["llmc_bucket_tokens_total"] == total["llmc_scheduled_tokens_total"] > 0
    assert total["llmc_bucket_padding_tokens_total"] == total["llmc_padding_tokens_total"]
    assert total["llmc_bucket_replays_total"] == total["llmc_steps_total"]
    assert total["llmc_bucket_replay_seconds_total"] > 0
    assert total["llmc_sequences_running"] == total["llmc_kv_blocks_used"] == 0
