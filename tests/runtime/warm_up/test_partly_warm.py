"""Servers, `llmc run` and `LLM()` with graphs that are not all warm, or not all there: the same answers."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from llmc.cli.main import EXIT_USAGE, main
from llmc.runtime import opening
from llmc.runtime.binding import Artifact, ArtifactInfo, Engine, GraphInfo, LlmcError
from llmc.runtime.llm import LLM
from llmc.runtime.params import SamplingParams
from llmc.runtime.request_error import RequestError
from llmc.runtime.server.app import create_app
from llmc.runtime.server.run import open_engine
from llmc.runtime.warm_up.budget import Budget, BudgetError, base_graphs, plan_budget
from llmc.runtime.warm_up.warm_up import WarmPlan, WarmStep

from support.server_harness import make_config, running_server, until

PROMPTS = [[(7 * i + j) % 250 + 3 for j in range(length)] for i, length in enumerate((3, 40, 200, 130))]


def answers(client: httpx.Client) -> list[Any]:
    bodies = [{"prompt": ids, "max_tokens": 6, "temperature": 0, "logprobs": 3} for ids in PROMPTS]
    return [client.post("/v1/completions", json=body).json()["choices"] for body in bodies]


def test_ready_after_hot_it_serves_the_same_bits(english_artifact: Path) -> None:
    with running_server(english_artifact) as running:
        warm = answers(running.client)
    config = make_config(english_artifact)
    engine = open_engine(config)
    graphs = engine.graphs
    base = base_graphs(graphs)
    rest = [i for i in range(len(graphs)) if i not in base]
    plan = WarmPlan((*base, *rest), len(base))
    go_on = threading.Event()
    replayed: list[int] = []

    def held(real: Callable[..., int]) -> Callable[..., int]:
        def wrapped(graph: int, *load: int) -> int:
            if graph in rest:
                assert go_on.wait(120)
            replayed.append(graph)
            return real(graph, *load)

        return wrapped

    engine.engine.warm_load = held(engine.engine.warm_load)  # type: ignore[method-assign]
    engine.engine.walk_graph = held(engine.engine.walk_graph)  # type: ignore[method-assign]

    async def talk() -> None:
        app = create_app(config, engine, None, plan)
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost", timeout=120) as client,
        ):

            async def ask() -> list[Any]:
                bodies = [{"prompt": ids, "max_tokens": 6, "temperature": 0, "logprobs": 3} for ids in PROMPTS]
                got = await asyncio.gather(*(client.post("/v1/completions", json=body) for body in bodies))
                return [answer.json()["choices"] for answer in got]

            while (ready := await client.get("/ready")).status_code != 200:
                await asyncio.sleep(0.001)
            coverage = ready.json()["graphs"]
            assert (coverage["warm"], coverage["hot"], coverage["total"]) == (len(base), len(base), len(graphs))
            assert await ask() == warm, "before the rest is warm"
            used = {i for i, one in enumerate(engine.graph_stats()) if one.replays}
            assert used <= set(base), "larger graphs serve"
            assert engine.stats().num_bucket_misses == 0
            go_on.set()
            while (await client.get("/ready")).json()["graphs"]["warm"] != len(graphs):
                assert await ask() == warm, "while the rest becomes warm"
            assert await ask() == warm
            assert sorted(replayed) == list(range(len(graphs)))
            assert {i for i, one in enumerate(engine.graph_stats()) if one.replays} - set(base)

    asyncio.run(talk())


def test_a_server_that_stops_leaves_the_rest(english_artifact: Path) -> None:
    with running_server(english_artifact) as running:
        total = running.client.get("/ready").json()["graphs"]["total"]
        until(lambda: running.client.get("/ready").json()["graphs"]["warm"] == total)
    config = dataclasses.replace(make_config(english_artifact), drain_timeout_s=5.0)
    engine = open_engine(config)

    async def stop_at_once() -> int:
        app = create_app(config, engine, None, WarmPlan(tuple(range(len(engine.graphs))), 1))
        async with app.router.lifespan_context(app):
            pass
        warm: int = app.state.server.warm_up.num_warm
        return warm

    assert asyncio.run(stop_at_once()) <= total


PARAMS = SamplingParams(max_tokens=5, temperature=0.0)


def tokens_of(llm: LLM) -> list[tuple[int, ...]]:
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, PARAMS)]


def test_the_python_api_has_budgets_and_a_warm_up(english_artifact: Path) -> None:
    with LLM(english_artifact, num_threads=1) as llm:
        assert llm.budget is None
        assert llm.warm_up.coverage()["skipped"]
        expected = tokens_of(llm)
        total = len(llm.graphs)
    steps: list[WarmStep] = []
    with LLM(english_artifact, num_threads=1, skip_warmup=False, warmup_seconds=0, on_warm_step=steps.append) as llm:
        assert len(steps) == total == llm.warm_up.num_warm
        assert llm.warm_up.counts.walked == sum(not step.replayed for step in steps) > 0
        assert tokens_of(llm) == expected
    pool = 8 << 20
    with LLM(
        english_artifact, num_threads=1, memory_utilization=0.5, graph_reserved_memory=0.5, kv_bytes=pool,
        skip_warmup=False,
    ) as llm:  # fmt: skip
        assert llm.budget is not None
        assert llm.budget.kv_bytes == pool
        assert llm.warm_up.num_warm == total - len(llm.budget.dropped)
        assert tokens_of(llm) == expected
    with pytest.raises(BudgetError, match="memory-utilization 1e-09 of"):
        LLM(english_artifact, memory_utilization=1e-9)
    with pytest.raises(BudgetError, match="divides a budget"):
        LLM(english_artifact, graph_prompt_ratio=0.5)
    with pytest.raises(RequestError, match="num_blocks 9 leaves a budget nothing to decide"):
        LLM(english_artifact, memory_utilization=0.5, num_blocks=9)


def test_a_budget_of_the_python_api_drops_graphs(english_artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def smallest(info: ArtifactInfo, graphs: Sequence[GraphInfo], *others: Any) -> Budget:
        kept = base_graphs(graphs, smallest=True)
        dropped = tuple(i for i in range(len(graphs)) if i not in kept)
        return dataclasses.replace(plan_budget(info, graphs, *others), kept=kept, dropped=dropped)

    with LLM(english_artifact, num_threads=1) as llm:
        expected = tokens_of(llm)
    monkeypatch.setattr(opening, "plan_budget", smallest)
    with LLM(english_artifact, num_threads=1, memory_utilization=0.5, kv_bytes=8 << 20) as llm:
        assert tokens_of(llm) == expected
        assert llm.budget is not None
        assert len(llm.budget.dropped) > 0
        stats = llm.engine.graph_stats()
        assert not any(stats[i].replays for i in llm.budget.dropped)
        assert llm.warm_up.coverage()["dropped"] == len(llm.budget.dropped)


def test_run_has_budgets_and_a_warm_up(english_artifact: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = [
        "run",
        str(english_artifact),
        "--prompt",
        "One",
        "--max-tokens",
        "2",
        "--temperature",
        "0",
        "--threads",
        "1",
    ]
    assert main(command) == 0
    plain = capsys.readouterr()
    assert "[warm-up]" not in plain.err
    assert main([*command, "--warmup", "--memory-utilization", "0.5", "--kv-bytes", str(8 << 20)]) == 0
    warm = capsys.readouterr()
    assert warm.out == plain.out
    lines = warm.err.splitlines()
    with Artifact(english_artifact) as opened:
        assert sum(line.startswith("[warm-up]") for line in lines) == len(opened.graphs())
    assert sum(line.startswith("llmc: memory: ") for line in lines) >= 4
    assert main([*command, "--graph-prompt-ratio", "0.5"]) == EXIT_USAGE
    assert "graph-prompt-ratio 0.5 divides a budget" in " ".join(capsys.readouterr().err.split())
    assert main([*command, "--memory-utilization", "1e-9"]) == 1
    assert "memory-utilization 1e-09 of" in capsys.readouterr().err


def test_dropped_graphs_change_no_answer(english_artifact: Path) -> None:
    with Artifact(english_artifact) as artifact:
        graphs = artifact.graphs()
        dropped = frozenset(range(len(graphs))) - set(base_graphs(graphs, smallest=True))
        with Engine(artifact, num_threads=1) as engine, Engine(artifact, num_threads=1) as whole:
            for index in dropped:
                engine.enable_graph(index, False)
            tokens = []
            for one in (engine, whole):
                ids = [one.submit(prompt, max_tokens=5, temperature=0.0, num_logprobs=2) for prompt in PROMPTS]
                while one.step():
                    pass
                events = [event for event in one.poll() if event.kind == "token"]
                by_id = {i: [(e.token_id, e.logprob) for e in events if e.request_id == i] for i in ids}
                tokens.append(list(by_id.values()))
            assert tokens[0] == tokens[1]
            assert all(not one.replays for i, one in enumerate(engine.graph_stats()) if i in dropped)
            with pytest.raises(LlmcError, match="does not exist"):
                engine.enable_graph(len(graphs), True)
            with pytest.raises(LlmcError, match="num_seqs of the load"):
                engine.warm_load(0, 999, 1, 1)
            assert engine.warm_load(0, 0, 0, 0) > 0
            assert np.isfinite(tokens[0][0][0][1])


def test_walks_change_nothing(english_artifact: Path) -> None:
    with Artifact(english_artifact) as artifact, Engine(artifact, num_threads=2) as engine:

        def generate() -> list[tuple[int, float]]:
            ids = [engine.submit(prompt, max_tokens=5, temperature=0.0, num_logprobs=2) for prompt in PROMPTS]
            for graph in range(len(artifact.graphs())):
                assert engine.walk_graph(graph) > 0
                engine.step()
            while engine.step():
                pass
            events = [event for event in engine.poll() if event.kind == "token"]
            return [(e.token_id, e.logprob) for i in ids for e in events if e.request_id == i]

        first = generate()
        assert len(first) == 5 * len(PROMPTS)
        assert generate() == first
        engine.check_integrity()
        with pytest.raises(LlmcError, match="does not exist"):
            engine.walk_graph(len(artifact.graphs()))
