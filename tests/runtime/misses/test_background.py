"""Graphs that join a running engine: compiled aside, taken over between two steps, with the same bits."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from llmc import ModelPathError, RequestError
from llmc.buckets.bucket import Bucket, BucketError
from llmc.buckets.misses import read_misses
from llmc.cli.main import main
from llmc.compiler.extend import add_buckets
from llmc.runtime.async_llm import AsyncLLM
from llmc.runtime.binding import Artifact, Engine, LlmcError
from llmc.runtime.binding.statistics import BucketMiss
from llmc.runtime.graphs_file import read_graphs
from llmc.runtime.llm import LLM
from llmc.runtime.misses import aside, background
from llmc.runtime.misses.background import BackgroundCompiler, BucketNews
from llmc.runtime.params import SamplingParams
from llmc.runtime.server.async_engine import AsyncEngine

from support.compiled import compile_tiny, random_tokens
from support.live_server import serving
from support.tiny_models import make_tiny_model

BLOCK = 16
PARAMS = SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True)


@pytest.fixture
def artifact(holed: Path, kernel_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LLMC_CACHE_DIR", str(kernel_cache))
    return Path(shutil.copytree(holed, tmp_path / "artifact"))


def submit(engine: Engine, vocab: int) -> list[int]:
    prompts = [random_tokens(vocab, 20, seed) for seed in range(3)]
    return [engine.submit(prompt, max_tokens=30, temperature=0.0, ignore_eos=True) for prompt in prompts]


def drain(engine: Engine, tokens: dict[int, list[int]]) -> None:
    for event in engine.poll():
        assert event.kind != "failed", event.error_message
        if event.kind == "token":
            tokens.setdefault(event.request_id, []).append(event.token_id)


def tokens_without(artifact: Path) -> list[list[int]]:
    with Artifact(artifact) as opened, Engine(opened, num_threads=2) as engine:
        submit(engine, opened.info.vocab_size)
        found: dict[int, list[int]] = {}
        while engine.step():
            drain(engine, found)
        return list(found.values())


def test_an_engine_goes_on_with_graphs_that_join(artifact: Path, kernel_cache: Path) -> None:
    expected = tokens_without(artifact)
    with Artifact(artifact) as opened:
        engine, vocab = Engine(opened, num_threads=2), opened.info.vocab_size
        submit(engine, vocab)
    found: dict[int, list[int]] = {}
    for _ in range(8):
        assert engine.step()
        drain(engine, found)
    misses = engine.stats.num_bucket_misses
    assert misses > 0
    # A graph of more tokens than any, too: the arena and the logits must grow under the requests that run.
    add_buckets(artifact, [Bucket("decode", 3, 64), Bucket("mixed", 4, 128)], cache_dir=kernel_cache)
    with Artifact(artifact) as grown:
        assert engine.add_graphs(grown) == range(4, 6)
    engine.check_integrity()
    assert engine.step()
    drain(engine, found)
    assert engine.stats.num_bucket_misses == misses + 1  # they are off
    for index in (4, 5):
        engine.warm_load(index, 1, 1, 1)
        engine.enable_graph(index, True)
    while engine.step():
        drain(engine, found)
        engine.check_integrity()
    assert list(found.values()) == expected
    assert engine.stats.num_bucket_misses == misses + 1
    # What was released is made anew.
    with pytest.raises(LlmcError, match="Graph 4 is on; turn it off"):
        engine.release_graph(4)
    for index in (1, 4):
        engine.enable_graph(index, False)
        engine.release_graph(index)
        engine.enable_graph(index, True)
    submit(engine, vocab)
    again: dict[int, list[int]] = {}
    while engine.step():
        drain(engine, again)
    assert list(again.values()) == expected
    stats = engine.graph_stats()
    assert len(stats) == 6
    assert stats[4].replays > 0
    # And once more, from a third artifact.
    add_buckets(artifact, [Bucket("decode", 3, 32)], cache_dir=kernel_cache)
    with Artifact(artifact) as grown:
        assert engine.add_graphs(grown) == range(6, 7)
    engine.close()


def test_only_the_same_artifact_with_more(artifact: Path, holed: Path, kernel_cache: Path, tmp_path: Path) -> None:
    other_model = make_tiny_model(tmp_path / "model", "llama", seed=3)
    ladder = str(holed.parent / "ladder.json")
    compile_tiny(other_model, tmp_path / "weights", kernel_cache, buckets=ladder, dtype="f32", block_size=BLOCK).close()
    compile_tiny(
        holed.parent / "model", tmp_path / "graphs", kernel_cache, buckets="prefill=1x64,decode=4x64", dtype="f32",
        block_size=BLOCK, max_num_seqs=4,
    ).close()  # fmt: skip
    with Artifact(artifact) as opened, Engine(opened, num_threads=2) as engine:
        for path, what in ((tmp_path / "weights", "weights"), (tmp_path / "graphs", "(graphs|kernels|model)")):
            with (
                Artifact(path) as other,
                pytest.raises(LlmcError, match=f"has other {what} than the engine's artifact"),
            ):
                engine.add_graphs(other)
        submit(engine, opened.info.vocab_size)
        found: dict[int, list[int]] = {}
        while engine.step():
            drain(engine, found)
        assert list(found.values()) == tokens_without(artifact)
        assert len(engine.graph_stats()) == 4


def wait_for(condition: Callable[[], bool]) -> None:
    """Fails only on a hang."""
    deadline = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def names(artifact: Path) -> list[str]:
    return [graph.name for graph in read_graphs(artifact).graphs]


def test_misses_get_their_graph_while_requests_run(artifact: Path) -> None:
    told: list[BucketNews] = []
    prompts = [random_tokens(60, 20, seed) for seed in range(3)]
    params = PARAMS
    with LLM(artifact, num_threads=1, miss_policy="background", on_bucket_news=told.append) as llm:
        before = [o.outputs[0].token_ids for o in llm.generate(prompts, params)]
        while not told:
            assert [o.outputs[0].token_ids for o in llm.generate(prompts, params)] == before
            time.sleep(0.2)  # the compiler runs behind everything else: leave it a core
        assert (told[0].bucket, told[0].error) == (Bucket("decode", 3, 64), None)
        assert told[0].num_graphs >= 1
        misses = llm.stats().num_bucket_misses
        assert misses > 0
        assert [o.outputs[0].token_ids for o in llm.generate(prompts, params)] == before
        assert llm.stats().num_bucket_misses == misses
        assert {use["graph"] for use in llm.graph_use()} >= {"decode:3x64"}
    assert names(artifact)[4:] == ["decode:3x64"]
    assert sorted(file.name for file in artifact.parent.iterdir()) == ["artifact"]
    assert not miss_threads()


def miss_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name in ("llmc-background", "llmc-misses")]


def test_tasks_of_an_event_loop_get_it_too(
    artifact: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a listener the logger is told. What the child would do is another test's: here the graph is there."""
    bucket = Bucket("decode", 3, 64)
    monkeypatch.setattr(aside, "_COMPILER", (sys.executable, "-c", "print('{}')"))
    add_buckets(Path(shutil.copytree(artifact, artifact.parent / "grown")), [bucket])
    monkeypatch.setattr(AsyncEngine, "add_graphs", lambda self, path, add=AsyncEngine.add_graphs: add(
        self, artifact.parent / "grown"))  # fmt: skip
    caplog.set_level("INFO", "llmc.misses")
    prompts = [random_tokens(60, 20, seed) for seed in range(3)]
    params = PARAMS

    async def use() -> None:
        async with AsyncLLM(artifact, num_threads=1, miss_policy="background") as llm:
            before = [o.outputs[0].token_ids for o in await llm.generate(prompts, params)]
            while not caplog.records:
                assert [o.outputs[0].token_ids for o in await llm.generate(prompts, params)] == before
                await asyncio.sleep(0.05)
            misses = llm.stats().num_bucket_misses
            assert misses > 0
            assert [o.outputs[0].token_ids for o in await llm.generate(prompts, params)] == before
            assert llm.stats().num_bucket_misses == misses

    asyncio.run(use())
    (record,) = caplog.records
    assert (record.name, record.levelname) == ("llmc.misses", "INFO")
    assert "added bucket decode:3x64" in record.getMessage()
    assert not miss_threads()


def test_misses_are_recorded(artifact: Path, tmp_path: Path) -> None:
    prompts = [random_tokens(60, 20, seed) for seed in range(3)]
    for policy in ("larger", "split"):
        with LLM(artifact, num_threads=1, miss_policy=policy, record_misses=tmp_path / f"{policy}.jsonl") as llm:
            llm.generate(prompts, PARAMS)
            count = llm.stats().num_bucket_misses
        assert sum(miss.count for miss in read_misses(tmp_path / f"{policy}.jsonl")) == count > 0
    (tmp_path / "notes").write_text("notes")
    with pytest.raises(BucketError, match="is not a record of misses"):
        LLM(artifact, record_misses=tmp_path / "notes")
    assert not miss_threads()


MISS = BucketMiss("decode", 3, 3, 2, 1, wanted=Bucket("decode", 3, 64))


def start(artifact: Path, add: Callable[[Path], int], told: list[BucketNews]) -> BackgroundCompiler:
    with Artifact(artifact) as opened:
        graphs = opened.graphs()
    return BackgroundCompiler(artifact, lambda: graphs, add, told.append)


def test_where_the_artifact_cannot_be_written(artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)
    taken: list[Path] = []
    said: list[BucketNews] = []

    def add(path: Path) -> int:
        taken.append(path)
        assert names(path)[4] == "decode:3x64"
        return 1

    compiler = start(artifact, add, said)
    compiler.take([MISS])
    wait_for(lambda: bool(said))
    assert len(names(artifact)) == 4
    assert taken[0].exists()
    compiler.close()
    assert not taken[0].exists()


def test_a_failure_is_told_once(artifact: Path, caplog: pytest.LogCaptureFixture) -> None:
    said: list[BucketNews] = []
    (artifact / "manifest.json").write_text("{}")
    compiler = start(artifact, lambda _: 1, said)
    compiler.take([MISS])
    wait_for(lambda: bool(said))
    compiler.take([MISS])
    compiler.close()
    assert len(said) == 1
    assert said[0].bucket == MISS.wanted
    assert "manifest.json" in str(said[0].error)
    assert said[0].line().startswith("warning: bucket decode:3x64 cannot be added: ")
    background.log_news(said[0])
    assert [(one.name, one.levelname) for one in caplog.records] == [("llmc.misses", "WARNING")]


def test_the_end_of_the_engine_ends_the_compiler(artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aside, "_COMPILER", (sys.executable, "-c", "import time; time.sleep(3600)"))
    compiler = start(artifact, lambda _: pytest.fail("nothing was compiled"), [])
    compiler.take([MISS])
    wait_for(lambda: compiler._compiler.child is not None)
    child = compiler._compiler.child
    assert child is not None
    compiler.close()
    compiler.close()
    assert child.returncode is not None
    assert not miss_threads()


def test_who_forgets_to_close_leaves_no_compiler_behind(artifact: Path, tmp_path: Path) -> None:
    note, prompts = tmp_path / "note", [random_tokens(60, 20, seed) for seed in range(3)]
    sleep = f"import os, time; open({str(note)!r} + '~', 'w').write(str(os.getpid())); " \
            f"os.rename({str(note)!r} + '~', {str(note)!r}); time.sleep(3600)"  # fmt: skip
    code = (
        "import os, sys, time; from llmc import LLM, SamplingParams; from llmc.runtime.misses import aside\n"
        f"aside._COMPILER = (sys.executable, '-c', {sleep!r})\n"
        f"llm = LLM({str(artifact)!r}, num_threads=1, miss_policy='background')\n"
        f"llm.generate({prompts!r}, SamplingParams(max_tokens=9, temperature=0.0, ignore_eos=True))\n"
        f"while not os.path.exists({str(note)!r}): time.sleep(0.05)\n"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")
    wait_for(lambda: not Path("/proc", note.read_text()).exists())


def test_the_compiler_gives_way(artifact: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    note = tmp_path / "note"
    code = f"import os; open({str(note)!r}, 'w').write(f'{{os.nice(0)}} {{os.sched_getscheduler(0)}}')"
    monkeypatch.setattr(aside, "_COMPILER", (sys.executable, "-c", code))
    said: list[BucketNews] = []
    compiler = start(artifact, lambda _: 1, said)
    compiler.take([MISS])
    wait_for(lambda: bool(said))
    compiler.close()
    nice, scheduler = map(int, note.read_text().split())
    assert nice == 19
    assert scheduler in (os.SCHED_IDLE, os.SCHED_OTHER)  # where the class is forbidden


def test_a_listener_that_fails_stops_nothing(artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aside, "_COMPILER", (sys.executable, "-c", "print('{}')"))
    told: list[BucketNews] = []

    def tell(news: BucketNews) -> None:
        told.append(news)
        raise OSError("the listener is broken")

    compiler = BackgroundCompiler(artifact, lambda: [], lambda _: 1, tell)
    compiler.take([MISS])
    wait_for(lambda: len(told) == 1)
    compiler.take([replace(MISS, wanted=Bucket("decode", 3, 80))])
    wait_for(lambda: len(told) == 2)
    compiler.close()


def test_the_command(artifact: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt_token_ids": random_tokens(60, 20, s)}) + "\n" for s in range(3)))
    arguments = [
        "run",
        str(artifact),
        "--prompts",
        str(prompts),
        "--max-tokens",
        "9",
        "--ignore-eos",
        "--quiet",
        "--json",
    ]
    texts = []
    for policy in ("larger", "background"):
        assert main([*arguments, "--temperature", "0", "--miss-policy", policy]) == 0
        texts.append([r["token_ids"] for r in json.loads(capsys.readouterr().out)["results"]])
    assert texts[0] == texts[1]
    assert [file.name for file in artifact.parent.iterdir() if ".tmp-" in file.name] == []


def test_without_the_compiler(
    artifact: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "tvm" else SimpleNamespace())
    assert main(["run", str(artifact), "--prompt", "x", "--miss-policy", "background"]) == 1
    why = "background compiles what traffic lacks, but tvm is not installed: pip install 'llmc-aot[compiler]'"
    assert f"--miss-policy {why}" in capsys.readouterr().err
    for make in (LLM, AsyncLLM):
        with pytest.raises(ModelPathError, match=re.escape(f"miss_policy {why}")):
            make(artifact, miss_policy="background")


def test_unknown_policies(artifact: Path) -> None:
    for make in (LLM, AsyncLLM):
        with pytest.raises(RequestError, match="'wait' is unknown: use larger, split, background, error"):
            make(artifact, miss_policy="wait")  # type: ignore[arg-type]


def test_a_server_gets_what_its_traffic_lacks(artifact: Path, chat_artifact: Path, tmp_path: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(chat_artifact / name, artifact / name)
    record = tmp_path / "misses.jsonl"
    body = {"model": "m", "prompt": [random_tokens(60, 20, seed) for seed in range(3)], "max_tokens": 40,
            "temperature": 0, "ignore_eos": True, "logprobs": 1}  # fmt: skip
    options = ("--served-model-name", "m", "--miss-policy", "background", "--record-misses", str(record))
    with serving(artifact, *options) as server:

        def ask() -> list[object]:
            answer = server.ask("POST", "/v1/completions", body)
            assert answer.status == 200, answer.content
            return [choice["logprobs"]["token_logprobs"] for choice in answer.json()["choices"]]

        def warm() -> tuple[int, float]:
            """Graphs that are warm, as /ready and as /metrics tell."""
            metrics = server.ask("GET", "/metrics").content.decode()
            line = next(line for line in metrics.splitlines() if line.startswith("llmc_graphs_warm "))
            return server.ask("GET", "/ready").json()["graphs"]["warm"], float(line.split()[-1])

        assert warm() == (4, 4)
        first = ask()
        deadline = time.monotonic() + 300
        while not any("added bucket decode:3x64" in line for line in server.log):
            assert ask() == first
            assert time.monotonic() < deadline, server.log
            time.sleep(0.2)  # as above
        joined = warm()
        assert joined[0] == joined[1] >= 5

        def replays() -> float:
            metrics = server.ask("GET", "/metrics").content.decode()
            line = next(line for line in metrics.splitlines() if line.startswith("llmc_bucket_replays_total")
                        and 'batch="3"' in line)  # fmt: skip
            return float(line.split()[-1])

        # The prompts of a body join one after another: on a busy machine the first may end before the last begins.
        while replays() == 0:
            assert ask() == first
            assert time.monotonic() < deadline, server.log
    found = read_misses(record)
    assert {str(miss.wanted) for miss in found} >= {"decode:3x32"}
    assert names(artifact)[4:] == ["decode:3x64"]
