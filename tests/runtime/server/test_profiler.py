"""Profiles of the running server, and the line of throughput."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llmc.runtime.binding.statistics import EngineStats
from llmc.runtime.server.profiler import Profiler, ProfilerBusy
from llmc.runtime.server.throughput import Throughput

from support.artifacts import TinyArtifact
from support.full_disk import room_for
from support.server_harness import error_of, running_server, until


def stats(**counts: int) -> EngineStats:
    names = [field.name for field in dataclasses.fields(EngineStats) if field.name != "device"]
    return EngineStats(**{name: counts.get(name, 0) for name in names}, device={})


def test_a_profile_tells_of_every_step_and_request(tiny_artifact: TinyArtifact, tmp_path: Path) -> None:
    with running_server(tiny_artifact.artifact, profiler_dir=tmp_path / "profiles") as server:
        server.complete([5, 6, 7], max_tokens=3, ignore_eos=True)  # before: not in the profile
        assert server.post("/start_profile").json() == {"status": "profiling"}
        assert "stop_profile" in error_of(server.post("/start_profile"), 409)["message"]
        before = server.engine.stats()
        for prompt in ([5, 6, 7], list(range(3, 23))):
            server.complete(prompt, max_tokens=4, ignore_eos=True)
        until(lambda: server.engine.num_active == 0)
        answer = server.post("/stop_profile").json()
        after = server.engine.stats()
        assert "start_profile" in error_of(server.post("/stop_profile"), 409)["message"]
        server.complete([5, 6, 7], max_tokens=2, ignore_eos=True)  # after it: not in it either
        assert server.engine.thread.profiler is not None
        assert server.engine.thread.profiler.on_step is None
        known = {f"{g.phase}:{g.batch}x{g.seq}" for g in server.engine.graphs}
        assert "/start_profile" in server.client.get("/openapi.json").json()["paths"]
    path = Path(answer["file"])
    assert list((tmp_path / "profiles").iterdir()) == [path]
    events: list[dict[str, Any]] = json.loads(path.read_text())["traceEvents"]
    steps = [e for e in events if e["ph"] == "X" and "args" in e]
    assert len(steps) == answer["steps"] == after.num_steps - before.num_steps
    assert {step["name"] for step in steps} <= known
    assert sum(step["args"]["tokens"] for step in steps) == after.scheduled_tokens - before.scheduled_tokens
    parts = [e for e in events if e["ph"] == "X" and "args" not in e]
    assert {e["name"] for e in parts} == {"schedule", "prepare", "replay", "sample"}
    for step in steps:
        inside = [e for e in parts if step["ts"] <= e["ts"] and e["ts"] + e["dur"] <= step["ts"] + step["dur"] + 1e-3]
        assert len(inside) >= 4
    begun = {(e["id"], e["name"]): e for e in events if e["ph"] == "b"}
    ended = {(e["id"], e["name"]): e for e in events if e["ph"] == "e"}
    assert begun.keys() == ended.keys()
    whole = [event for (_, name), event in begun.items() if name == "request"]
    assert answer["requests"] == len(whole) == 2
    assert sorted(event["args"]["prompt_tokens"] for event in whole) == [3, 20]
    assert all(event["args"]["output_tokens"] == 4 for event in whole)
    assert all(begun[key]["ts"] <= ended[key]["ts"] for key in begun)


def test_without_the_flag_there_are_no_endpoints(tiny_artifact: TinyArtifact) -> None:
    with running_server(tiny_artifact.artifact) as server:
        assert server.post("/start_profile").status_code == 404
        assert "/start_profile" not in server.client.get("/openapi.json").json()["paths"]


def test_a_profile_is_bounded_and_kept_when_it_cannot_be_written(tmp_path: Path) -> None:
    count = [0]
    profiler = Profiler(tmp_path / "deep" / "er", lambda: stats(num_steps=count[0]), list, [], max_steps=3)

    def step() -> None:
        count[0] += 1
        assert profiler.on_step is not None
        profiler.on_step()

    with pytest.raises(ProfilerBusy):
        profiler.stop()
    profiler.start()
    for _ in range(5):
        step()
    (tmp_path / "deep" / "er").rmdir()
    with pytest.raises(OSError, match="No such file"):
        profiler.stop()
    (tmp_path / "deep" / "er").mkdir()
    with room_for(64), pytest.raises(OSError, match="too large"):
        profiler.stop()
    assert list((tmp_path / "deep" / "er").iterdir()) == []
    first = profiler.stop()
    assert (first["steps"], first["dropped_steps"]) == (3, 2)
    profiler.start()
    assert profiler.stop()["file"] != first["file"], "a second profile replaces none"


def test_throughput_of_an_interval() -> None:
    told = Throughput(
        stats(num_steps=5, prompt_tokens=1000, output_tokens=50, num_blocks=10, num_free_blocks=10), 100.0
    )
    busy = stats(
        num_steps=9,
        prompt_tokens=1300,
        output_tokens=90,
        scheduled_tokens=75,
        padded_tokens=25,
        prefix_query_tokens=300,
        prefix_hit_tokens=96,
        num_running=2,
        num_waiting=1,
        num_blocks=10,
        num_free_blocks=4,
    )
    assert told.line(busy, 110.0) == (
        "prompt 30.0 tokens/s; generation 4.0 tokens/s; 2 running, 1 waiting; KV blocks 60 %; padding 25 %; "
        "prefix hits 32 %"
    )
    later = told.line(dataclasses.replace(busy, num_steps=11, output_tokens=110), 115.0)
    assert later is not None
    assert later.startswith("prompt 0.0 tokens/s; generation 4.0 tokens/s")
    assert "prefix" not in later, "nothing was looked up"


def test_an_idle_server_is_silent_and_one_that_is_stuck_is_not() -> None:
    told = Throughput(stats(num_steps=5), 0.0)
    assert told.line(stats(num_steps=5), 10.0) is None
    waiting = told.line(stats(num_steps=5, num_waiting=3), 20.0)
    assert waiting is not None
    assert "3 waiting" in waiting


def test_the_server_tells_its_throughput(tiny_artifact: TinyArtifact, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    say: Callable[[str], None] = lines.append
    monkeypatch.setattr("llmc.runtime.server.observers._say", say)
    with running_server(tiny_artifact.artifact, stats_interval_s=0.01) as server:
        server.complete([5, 6, 7], max_tokens=20, ignore_eos=True)
        until(lambda: any("generation" in line for line in lines))
