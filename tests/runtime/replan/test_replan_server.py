"""A server that compiles beside serving, tries what it compiled and keeps it: every answer has the same bits."""

from __future__ import annotations

import json
import shutil
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from llmc.buckets.bucket import Bucket
from llmc.buckets.replanning import proposal
from llmc.buckets.replanning.proposal import Policy
from llmc.cli.main import main
from llmc.runtime.graphs_file import read_graphs
from llmc.runtime.misses import aside
from llmc.runtime.replan.options import ReplanOptions
from llmc.runtime.replan.trial import Trial, Verdict

from support.compiled import random_tokens
from support.server_harness import Running, running_server, until

EAGER = Policy(unit="tokens", least_steps=20, max_added=1, once_s=0, graph_s=0)
BODY = {"prompt": [random_tokens(60, 20, seed) for seed in range(3)], "max_tokens": 40, "temperature": 0.7, "seed": 5,
        "ignore_eos": True, "logprobs": 1}  # fmt: skip


@pytest.fixture
def artifact(holed: Path, chat_artifact: Path, kernel_cache: Path, tmp_path: Path, monkeypatch: Any) -> Path:
    monkeypatch.setenv("LLMC_CACHE_DIR", str(kernel_cache))
    # As low as priorities go, it would take as long as the machine is busy with other tests.
    plain = "import sys; from llmc.runtime.misses import behind; behind.become(sys.argv[1:])"
    monkeypatch.setattr(aside, "_BEHIND", (sys.executable, "-P", "-c", plain))
    copy = Path(shutil.copytree(holed, tmp_path / "artifact"))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(chat_artifact / name, copy / name)
    return copy


def ask(running: Running) -> list[Any]:
    answer = running.post("/v1/completions", **BODY)
    assert answer.status_code == 200, answer.text
    return [choice["logprobs"] for choice in answer.json()["choices"]]


def replanning(running: Running) -> dict[str, Any]:
    state: dict[str, Any] = running.client.get("/v1/llmc/replan").json()
    return state


def test_buckets_come_and_go_under_load_and_no_bit_changes(artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first_of_all: list[Trial] = []
    judge = Trial.verdict

    def decide(self: Trial, *, final: bool) -> Verdict:
        """The first trial ends badly, the second one well, whatever this machine's clock says; after some steps."""
        found = judge(self, final=final)
        if min(found.steps_on, found.steps_off) < 5:
            return found
        first_of_all.append(self)
        pays = first_of_all[0] is not self
        return Verdict(pays, found.saving, found.error, found.padding_saving, found.steps_on, found.steps_off, "said")

    monkeypatch.setattr(Trial, "verdict", decide)
    # One compilation will do.
    wanted = Bucket("decode", 3, 192, total=True)
    monkeypatch.setattr(proposal, "candidates", lambda uses, have, *_, **__: [] if wanted in have else [wanted])
    options = ReplanOptions("auto", EAGER, interval_s=0.5, window_s=0.1, backoff_s=0.1, least_trial_steps=5)
    with running_server(artifact, replan=options) as running:
        first = ask(running)
        stop, compiled, wrong = threading.Event(), threading.Event(), list[Any]()

        def load() -> None:
            while not stop.is_set():
                if (answer := ask(running)) != first:
                    wrong.append(answer)
                # The compiler runs behind everything else: leave it a core until it is done.
                stop.wait(0.001 if compiled.is_set() else 0.3)

        threads = [threading.Thread(target=load) for _ in range(2)]
        for thread in threads:
            thread.start()
        try:
            until(lambda: replanning(running)["counts"]["compiled"] + replanning(running)["counts"]["failed"] > 0)
            compiled.set()
            until(lambda: {"kept", "published"} <= {one["kind"] for one in replanning(running)["decisions"]})
            assert wrong == []
        finally:
            stop.set()
            for thread in threads:
                thread.join()
        assert wrong == []
        assert ask(running) == first
        assert running.on_loop(running.engine.check_integrity) is None
        state = replanning(running)
        assert state["counts"]["reverted"] >= 1
        assert [one["added"] for one in state["decisions"] if one["kind"] == "kept"] == [["decode:3x192total"]]
        assert state["counts"]["compiled"] == 1
        assert "decode:3x192total" in state["on"]
        page = running.client.get("/v1/llmc/state").json()["replan"]
        assert page["mode"] == "auto"
        assert page["decisions"]
        metrics = running.client.get("/metrics").text
        assert 'llmc_replan_decisions_total{kind="kept"}' in metrics
        assert "llmc_replan_shape_steps{" in metrics
        url = running.url
        assert main(["buckets", "replan", "--url", url, "--cost", "tokens", "--json"]) == 0
    # The next start has what stayed, and nothing else lies about.
    assert [graph.name for graph in read_graphs(artifact).graphs][4:] == ["decode:3x192total"]
    assert sorted(file.name for file in artifact.parent.iterdir()) == ["artifact"]
    with running_server(artifact) as running:
        assert ask(running) == first
        assert running.client.get("/v1/llmc/replan").status_code == 404


def test_suggest_shows_and_never_acts(artifact: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ReplanOptions("suggest", EAGER, interval_s=0.1, window_s=0.05)
    with running_server(artifact, replan=options) as running:
        first = ask(running)
        # Steps before the engine counts them say nothing.
        until(lambda: ask(running) == first and bool((replanning(running)["proposal"] or {"changes": []})["changes"]))
        while replanning(running)["num_steps"] < 250:
            assert ask(running) == first
        assert len(running.engine.graphs) == 4
        assert main(["buckets", "replan", "--url", running.url, "--cost", "tokens"]) == 0
        text = capsys.readouterr().out
        assert "padding saved" in text
        assert "--replan suggest, 4 graphs in use, 0 off" in text
        assert main(["buckets", "replan", "--url", running.url, "--cost", "tokens", "--json"]) == 0
        data = json.loads(capsys.readouterr().out)
        assert data["changes"]
        assert data["server"]["counts"]["compiled"] == 0
