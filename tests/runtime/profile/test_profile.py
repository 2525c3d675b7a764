"""`llmc profile` on the tiny model: every command is there, times add up, costs and limits are what they claim."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmc.cli import main as cli
from llmc.graphs_format import FAMILIES
from llmc.graphs_records import Tables
from llmc.runtime.binding import Artifact, LlmcError, Replayer
from llmc.runtime.binding.machine_limits import LIMITS, Probe
from llmc.runtime.graphs_file import read_graphs
from llmc.runtime.profile import profiler
from llmc.runtime.profile.costs import Cost, visible_keys
from llmc.runtime.profile.html import profile_html
from llmc.runtime.profile.profiler import as_replay, bound
from llmc.runtime.profile.steps import Step, full_step

from support.artifacts import TinyArtifact
from support.cpu_level import machine_level

pytestmark = pytest.mark.native
BUCKETS = ("decode:1x64", "decode:2x64", "prefill:1x16", "prefill:2x32")


@pytest.fixture(scope="module")
def tables(tiny_artifact: TinyArtifact) -> Tables:
    return read_graphs(tiny_artifact.artifact)


@pytest.fixture(autouse=True)
def short_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    """How near limits are to the machine's does not matter here."""
    measure = profiler.measure_limits
    monkeypatch.setattr(profiler, "measure_limits", lambda probe, names, seconds: measure(probe, names, 0.01))


def profile(artifact: Path, capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, Any]:
    capsys.readouterr()
    assert cli.main(["profile", str(artifact), "--repeat", "3", "--json", *options]) == 0
    data = json.loads(capsys.readouterr().out)
    assert isinstance(data, dict)
    return data


@pytest.mark.parametrize(("bucket", "threads"), [(b, t) for b in BUCKETS for t in (1, 2)][::3])
def test_times_add_up(
    bucket: str, threads: int, tiny_artifact: TinyArtifact, tables: Tables, capsys: pytest.CaptureFixture[str]
) -> None:
    data = profile(tiny_artifact.artifact, capsys, "--bucket", bucket, "--threads", str(threads))
    graph = next(graph for graph in tables.graphs if graph.name == bucket)
    expected = [(tables.kernels[c.kernel].symbol, FAMILIES[c.family]) for c in tables.commands_of(graph)]
    commands = data["commands"]
    assert [(c["symbol"], c["family"]) for c in commands] == expected
    assert all(c["us"] > 0 and len(c["us_per_thread"]) == threads for c in commands)
    total = data["replay"]["us"]
    assert data["step_us"]["min"] <= total <= data["step_us"]["max"]
    assert sum(c["us"] for c in commands) <= total
    for key in ("families", "kernels"):
        assert sum(row["us"] for row in data[key]) == pytest.approx(sum(c["us"] for c in commands))
        assert sum(row["commands"] for row in data[key]) == len(commands)
    for row in data["per_thread"]:
        parts = [row[f"{name}_us"] for name in ("kernels", "imbalance", "sync")]
        assert min(parts) >= 0
        # Clocks of two cores may differ by some nanoseconds a command.
        assert sum(parts) <= total + 0.1 * len(commands)
    assert (max(max(c["imbalance_us_per_thread"]) for c in commands) > 0) == (threads > 1)
    assert sum(data["replay"][f"{n}_share"] for n in ("kernels", "imbalance", "sync", "overhead")) == pytest.approx(1)


def test_costs(tiny_artifact: TinyArtifact, tables: Tables, capsys: pytest.CaptureFixture[str]) -> None:
    """The tiny llama: hidden 60, MLP 100, 3 heads and one KV head of 20, 2 layers, f32, vocabulary 515."""
    layer = 60 * 60 + 2 * 60 * 20 + 60 * 60 + 3 * 60 * 100
    found = {
        row["name"]: row for row in profile(tiny_artifact.artifact, capsys, "--bucket", "prefill:1x16")["families"]
    }
    assert found["linear"]["flops"] == 2 * (16 * 2 * layer + 60 * 515)
    assert found["attention"]["flops"] == 2 * 4 * 3 * 20 * (16 * 17 // 2)
    found = {row["name"]: row for row in profile(tiny_artifact.artifact, capsys, "--context", "33")["families"]}
    assert found["linear"]["flops"] == 2 * (2 * layer + 60 * 515)
    # K is stored 20 wide, V 32 wide.
    assert found["attention"]["memory_bytes"] == 2 * 33 * (20 + 32) * 4
    linear_weights = sum(
        w.bytes for w in tables.weights if not w.name.endswith(("norm.weight", "embed.weight", "cos_sin"))
    )
    assert found["linear"]["memory_bytes"] == linear_weights >= 4 * (2 * layer + 60 * 515)


def test_trace(tiny_artifact: TinyArtifact, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.json"
    data = profile(tiny_artifact.artifact, capsys, "--threads", "2", "--trace", str(path))
    events = json.loads(path.read_text())["traceEvents"]
    for thread in range(2):
        mine = [e for e in events if e["ph"] == "X" and e["tid"] == thread]
        kernels = [e for e in mine if e["cat"] != "barrier"]
        assert [e["args"]["command"] for e in kernels] == list(range(len(data["commands"])))
        assert [e["name"] for e in kernels] == [c["op"] for c in data["commands"]]
        ends = [e["ts"] + e["dur"] for e in mine]
        assert all(e["dur"] >= 0 for e in mine)
        # On its track an event begins when the one before it has ended.
        assert all(e["ts"] >= end - 1e-3 for e, end in zip(mine[1:], ends, strict=False))
        assert ends[-1] <= data["replay"]["us"] + 1
    assert {e["name"] for e in events if e["ph"] == "M"} == {"process_name", "thread_name"}


def test_table(tiny_artifact: TinyArtifact, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert cli.main(["profile", str(tiny_artifact.artifact), "--repeat", "1", "--phase", "prefill", "--top", "3"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("prefill:1x16: 1 sequences, 16 new tokens")
    assert all(word in text for word in ("limits", "linear", "attention", "% of limit", "imbalance", "overhead"))


@pytest.mark.parametrize(
    ("options", "fragment"),
    [
        (["--bucket", "decode:9x64"], "decode:9x64"),
        (["--phase", "mixed"], "mixed"),
        (["--context", "65"], "65"),
        (["--bucket", "prefill:1x16", "--context", "3"], "prefill:1x16"),
        (["--repeat", "0"], "'--repeat': 0"),
    ],
)
def test_wrong_usage(
    options: list[str], fragment: str, tiny_artifact: TinyArtifact, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    assert cli.main(["profile", str(tiny_artifact.artifact), *options]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert len(captured.err.strip().splitlines()) == 1
    assert fragment in captured.err


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["profile", "--help"]) == 0
    assert "  llmc profile qwen.llmc --bucket decode:1x512" in capsys.readouterr().out


def test_summary_of_a_run(tiny_artifact: TinyArtifact, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"prompt_token_ids": [5, 6, 7]}\n')
    options = ["--prompts", str(prompts), "--max-tokens", "8", "--ignore-eos", "--output", str(tmp_path / "out.jsonl")]
    assert cli.main(["run", str(tiny_artifact.artifact), *options, "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)["summary"]
    shares, times = summary["decode"], summary["time_s"]
    assert sum(shares.values()) == pytest.approx(1)
    assert 0 < shares["kernels"] < 1
    assert 0 < shares["overhead"] < 1
    assert 0 <= shares["barrier"] < 1
    assert times["kernel"] + times["barrier"] <= times["replay"]
    parts = [times[name] for name in ("schedule", "prepare", "replay", "sample")]
    assert min(parts) > 0
    assert sum(parts) <= times["step"]
    assert cli.main(["run", str(tiny_artifact.artifact), *options, "--overwrite", "--stats"]) == 0
    assert "overhead" in capsys.readouterr().err


def test_command_times_need_profiling(tiny_artifact: TinyArtifact, tables: Tables) -> None:
    model, step = tables.model, full_step(tables, tables.graphs[0])
    with Artifact(tiny_artifact.artifact) as artifact, Replayer(artifact, num_threads=2) as replayer:
        for on in (False, True, False):
            replayer.set_profiling(on)
            with pytest.raises(LlmcError, match="was not profiled"):
                replayer.command_times(0)
            before = replayer.stats
            step.run(replayer, 0, model.block_size, model.vocab_size)
            after = replayer.stats
            assert after.kernel_ns > before.kernel_ns
            assert after.kernel_ns + after.barrier_ns <= after.total_ns
            if on:
                times = replayer.command_times(1)
                assert times.shape == (tables.graphs[0].num_commands, 3)
                assert (np.diff(times.ravel().astype(np.int64)) >= 0).all()
        with pytest.raises(LlmcError, match="thread 2 does not exist"):
            replayer.command_times(2)


def test_barrier_waits() -> None:
    """Two commands on two threads; the first ends in a barrier, the second at the end of the replay."""
    times = np.array([[[0, 10, 35], [35, 50, 50]], [[2, 30, 34], [34, 60, 60]]], np.uint64)
    replay = as_replay(times, np.array([True, False]), 64.0)
    assert replay.imbalance.tolist() == [[20, 10], [0, 0]]
    assert replay.sync.tolist() == [[5, 0], [4, 0]]
    assert replay.kernel.tolist() == [[10, 15], [28, 26]]
    assert replay.overhead(0) == 64 - 25 - 30 - 5


def test_what_binds() -> None:
    limits: dict[str, float | None] = {"read": 10e9, "f32": 100e9, "bf16": None}
    for macs, limit, binds in ((200, "read", 100), (20000, "f32", 200)):
        found, figure = bound(Cost(1000, 5000, macs), "f32", limits)
        assert found == limit
        assert figure == pytest.approx(binds)
    assert bound(Cost(0, 100, 0), "f32", limits) == (None, 0)


@pytest.mark.parametrize("window", [0, 1, 5, 100])
def test_visible_keys(window: int) -> None:
    step = Step(((0, 7), (11, 1), (3, 4)))
    expected = sum(
        min(position + 1, window or position + 1)
        for start, count in step.sequences
        for position in range(start, start + count)
    )
    assert visible_keys(step, window) == expected


def test_probe_measures_what_the_cpu_has() -> None:
    with Probe(1, read_bytes=64 << 20) as probe:
        rates = {limit: probe.measure(limit, 0.01) for limit in LIMITS}
        assert rates["read"] is not None
        assert rates["f32"] is not None
        assert all(rate is None or (rate > 0 and math.isfinite(rate)) for rate in rates.values())
        assert (rates["int8"] is not None) == (machine_level() >= 3)
        assert (rates["bf16"] is not None) == (machine_level() >= 4)
        with pytest.raises(LlmcError, match="seconds is 0"):
            probe.measure("read", 0)
        with pytest.raises(ValueError, match="'disk'"):
            probe.measure("disk")
    with pytest.raises(LlmcError, match="read_bytes is 4096"):
        Probe(1, read_bytes=4096)


def test_a_report_without_limits_or_flops(tiny_artifact: TinyArtifact, capsys: pytest.CaptureFixture[str]) -> None:
    """A machine may lack limits, a graph products."""
    data = profile(tiny_artifact.artifact, capsys, "--bucket", "decode:1x64")
    bare = data | {"limits": dict.fromkeys(data["limits"])}
    none = bare | {"kernels": [row | {"flops": 0, "gflop_per_s": None} for row in data["kernels"]]}
    for known, marks in ((data, True), (bare, True), (none, False)):
        page = profile_html(known, "tiny")
        assert ("<circle" in page) == marks
        assert ("memory, " in page) == (known is data)
        assert not re.search(r"\b(nan|inf)\b", page.partition("<main")[2].partition("</main>")[0])
