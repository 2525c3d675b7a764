"""Estimates of what compiling takes: from what compilations took here, else a documented guess."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from llmc.buckets.planner import Resources
from llmc.cli.main import main
from llmc.compiler.compile_times import learned, note
from llmc.compiler.config import CompileConfig, CompileReport

GUESS = Resources()


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LLMC_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def report(once_s: float = 10.0, graph_s: float = 0.5, graphs: int = 4, cached: int = 0) -> CompileReport:
    phases = {"start": 1.0, "load": once_s - 4, "trace": 2.0, "graphs": graph_s * graphs, "kernels": 1.0}
    return CompileReport(Path("out"), "x", graphs - 1, 1, 0, 9, 9 - cached, cached, 1, 1, 1, 1, phases)


CONFIG = CompileConfig(Path("model"), Path("out"))


def test_without_a_compilation_it_is_the_guess(cache: Path) -> None:
    assert learned(GUESS) == GUESS
    assert GUESS.compile_s(0) > 0
    assert GUESS.compile_s(72) - GUESS.compile_s(71) == pytest.approx(GUESS.compile_graph_s)


def test_a_compilation_is_learned_from(cache: Path) -> None:
    note(report(), CONFIG)
    known = learned(GUESS)
    assert known == replace(GUESS, compile_once_s=10.0, compile_graph_s=0.5)
    # An estimate of that very compilation is what it took.
    assert known.compile_s(4) == pytest.approx(sum(report().phase_seconds.values()))
    note(report(once_s=30.0), CONFIG)
    note(report(once_s=12.0, graph_s=0.7), CONFIG)
    assert (learned(GUESS).compile_once_s, learned(GUESS).compile_graph_s) == (12.0, 0.5)


def test_a_named_cache_keeps_its_own(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    note(report(), replace(CONFIG, cache_dir=tmp_path / "other"))
    assert learned(GUESS) == GUESS
    monkeypatch.setenv("LLMC_CACHE_DIR", str(tmp_path / "other"))
    assert learned(GUESS).compile_once_s == 10.0


def test_what_tells_nothing_of_a_first_compilation_is_left_out(cache: Path) -> None:
    note(report(cached=1), CONFIG)
    note(report(), replace(CONFIG, jobs=1))
    assert learned(GUESS) == GUESS


def test_another_machine_tells_nothing(cache: Path) -> None:
    note(report(), CONFIG)
    path = cache / "costs" / "compile.json"
    data = json.loads(path.read_text())
    data["compiles"][0]["machine"]["cpus"] = "4096"
    path.write_text(json.dumps(data))
    assert learned(GUESS) == GUESS


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"llmc_compile_times": 1}', '{"llmc_compile_times": 1, "compiles": [3, {"machine": {}}]}',
     '{"llmc_compile_times": 1, "compiles": [{"machine": {}, "once_s": NaN, "graph_s": -1.0}]}'],
)  # fmt: skip
def test_a_damaged_file_is_mended(cache: Path, text: str) -> None:
    path = cache / "costs" / "compile.json"
    path.parent.mkdir(parents=True)
    path.write_text(text)
    assert learned(GUESS) == GUESS
    note(report(), CONFIG)
    assert learned(GUESS).compile_once_s == 10.0


def test_what_cannot_be_written_does_no_harm(cache: Path) -> None:
    cache.write_text("no directory")
    note(report(), CONFIG)
    assert learned(GUESS) == GUESS


def test_commands_estimate_by_it(cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"arrival_s": 0, "prompt_tokens": 50, "output_tokens": 3}\n' * 3)
    simulate = ["buckets", "simulate", "--trace", str(trace), "--buckets", "prefill=1x[64,128],decode=1x128", "--json"]
    plan = ["buckets", "plan", "--trace", str(trace), "--max-model-len", "128", "--max-num-seqs", "1", "--json"]
    for once_s, graph_s in ((GUESS.compile_once_s, GUESS.compile_graph_s), (10.0, 0.5)):
        assert main(simulate) == 0
        assert json.loads(capsys.readouterr().out)["ladders"][0]["compile_s"] == pytest.approx(once_s + 3 * graph_s)
        assert main(plan) == 0
        planned = json.loads(capsys.readouterr().out)
        graphs = sum(map(len, planned["ladder"].values()))
        assert planned["compile_s"] == pytest.approx(once_s + graphs * graph_s)
        note(report(), CONFIG)
    assert main([*plan, "--max-compile-time", "10.7"]) == 1
    assert "take about 11 s; allow that" in capsys.readouterr().err
