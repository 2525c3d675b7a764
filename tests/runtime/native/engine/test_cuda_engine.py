"""Engines on a CUDA device, with kernels on the host, behind a driver that checks every call.

Adapters, offloaded weights, blocks that are swapped, graphs that join: bits are those of each request alone. Kernels
begin while those before them end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from llmc.buckets import Bucket
from llmc.compiler.extend import add_buckets
from llmc.runtime.adapters.adapters import Adapters
from llmc.runtime.binding import Artifact, Engine, LlmcError, Replayer
from llmc.runtime.graphs_file import read_graphs

from support.adapter_setting import Setting, drive, make_setting
from support.compiled import Pages, replay
from support.cuda import Stub, fake_nvcc, kernels_on_host, stub_library
from support.engine_driver import Request, mixed_requests
from support.late_arrivals import fail_by_chance

NAMES = ("a", None, "b", "c", "b")
TARGET = "cuda:sm_80,sm_90+dependent"


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory, kernel_cache: Path) -> Iterator[Setting]:
    """A small artifact whose graphs and adapters are few: a GPU's work items are slow on a host."""
    ladder = "prefill=[1]x[16],decode=[1,4]x[128],mixed=[4]x[12]"
    with fake_nvcc(tmp_path_factory.mktemp("nvcc")):
        yield make_setting(tmp_path_factory, kernel_cache, TARGET, ladder, num_hidden_layers=1)


@pytest.fixture(scope="module")
def more(setting: Setting, tmp_path_factory: pytest.TempPathFactory, kernel_cache: Path) -> Path:
    """The same with larger graphs, which need more memory to work in."""
    path = tmp_path_factory.mktemp("more") / "artifact"
    new = [Bucket.parse("decode:3x128"), Bucket.parse("prefill:4x16")]
    add_buckets(setting.artifact, new, path, cache_dir=kernel_cache, jobs=1)
    return path


@pytest.fixture
def stub(
    more: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> Iterator[Stub]:
    """At the end of a test there was no mistake, and all is given back."""
    folder = tmp_path_factory.getbasetemp() / "cuda-engine"
    if not folder.exists():
        folder.mkdir()
        stub_library(folder)
        kernels_on_host(more, folder)
    monkeypatch.setenv("STUB_CUDA_KERNELS", str(folder / "kernels.so"))
    monkeypatch.setenv("LLMC_CUDA_LIBRARY", str(folder / "libstub_cuda.so"))
    stub = Stub(folder / "libstub_cuda.so")
    yield stub
    assert stub.report() == ""
    stub.recover()


def requests_of() -> list[Request]:
    """Greedy and seeded, n > 1, penalties, a shared prefix: few tokens of each."""
    return [(prompt[:40], replace(params, max_tokens=14)) for prompt, params in mixed_requests()[: len(NAMES)]]


@pytest.fixture
def opened(setting: Setting, stub: Stub) -> Callable[..., tuple[Engine, list[Any]]]:
    """Opens an engine with the adapters of NAMES, and says the requests that it gets."""

    def open_one(**options: Any) -> tuple[Engine, list[Any]]:
        with Artifact(setting.artifact) as artifact:
            engine = Engine(artifact, **{"num_blocks": 40, **options})
            adapters = Adapters(setting.artifact, artifact, engine)
            numbers = {name: adapters.load(name, setting.adapters[name]).id for name in "cab"}
        requests = zip(requests_of(), NAMES, strict=True)
        return engine, [(prompt, params, numbers.get(name or "", 0)) for (prompt, params), name in requests]

    return open_one


@pytest.fixture
def alone(opened: Callable[..., tuple[Engine, list[Any]]]) -> list[list[tuple[Any, ...]]]:
    """Each request by itself, launched kernel by kernel, with weights on the host."""
    engine, requests = opened(eager=True, prefix_cache=0, offload_mib=1, overlap=False)
    assert 0 < engine.stats.device["offloaded_weight_bytes"] <= engine.stats.device["weight_bytes"]
    with engine:
        drawn = [drive(engine, [request])[0] for request in requests]
        assert engine.stats.num_ahead_steps == 0
    return drawn


@pytest.mark.slow
def test_bits_do_not_depend_on_company_swaps_and_new_graphs(
    opened: Callable[..., tuple[Engine, list[Any]]],
    alone: list[list[tuple[Any, ...]]],
    more: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Once an engine is ready, no code is loaded, or built from PTX."""
    engine, requests = opened(num_blocks=7, max_num_seqs=4, swap_bytes=1 << 19, swap_always=1, prefix_cache=0)
    monkeypatch.setenv("STUB_CUDA", "ModuleLoadData=2")
    with engine:
        assert drive(engine, requests) == alone
        stats = engine.stats
    with pytest.raises(LlmcError, match="Loading kernel"):
        opened()
    monkeypatch.delenv("STUB_CUDA")
    assert stats.num_preemptions > 0
    assert stats.num_mixed_steps > 0
    assert stats.device["saved_blocks"] >= stats.device["loaded_blocks"] > 0

    engine, requests = opened()
    with engine, Artifact(more) as extended:
        first = drive(engine, requests[:2])
        before = len(engine.graph_stats())
        joined = engine.add_graphs(extended)
        for index in range(before):
            engine.enable_graph(index, False)
        for index in joined:
            engine.enable_graph(index, True)
        assert first + drive(engine, requests[2:]) == alone
        stats_of = engine.graph_stats()
        assert all(stats_of[index].replays > 0 for index in joined)
        assert engine.stats.device["recorded_graphs"] == before + len(joined)
        assert engine.stats.num_ahead_steps >= engine.stats.device["chained_steps"] > 0


def test_calls_that_fail_by_chance(
    opened: Callable[..., tuple[Engine, list[Any]]],
    alone: list[list[tuple[Any, ...]]],
    stub: Stub,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Requests of failed steps fail, and no other; nothing hangs, and all is given back. What was answered until then
    has its bits, also by the prefix cache and swap space that are left."""
    engine, requests = opened(num_blocks=9, max_num_seqs=4, swap_bytes=1 << 19, swap_always=1)
    with engine:
        reasons = fail_by_chance(engine, requests, alone, partial(monkeypatch.setenv, "STUB_CUDA"), one_in=250)
    assert 0 < reasons.count("error") < len(reasons)
    assert stub.num_failed() > 3


@pytest.mark.parametrize(
    ("facts", "options", "early"),
    [
        ("", {}, True),
        ("", {"eager": True}, True),
        ("", {"dependent_launches": False}, False),
        ("driver=12020", {}, False),
        ("capability=80", {}, False),
        ("capability=100", {}, False),  # by PTX for sm_80
    ],
)
def test_kernels_begin_early_where_all_of_them_wait(
    facts: str,
    options: dict[str, Any],
    early: bool,
    setting: Setting,
    stub: Stub,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All but the first one of a graph, which is behind a copy."""
    monkeypatch.setenv("STUB_CUDA", facts)
    with Artifact(setting.artifact) as artifact, Replayer(artifact, num_blocks=4, **options) as replayer:
        pages = Pages(4, artifact.info.block_size)
        assert replayer.device_stats()["dependent_launches"] == early
        for index, graph in enumerate(read_graphs(setting.artifact).graphs[:2]):
            stub.launches()
            replay(replayer, index, pages, [(0, [3, 4, 5][: graph.max_tokens], 0)])
            mode = "launched" if options.get("eager") else "replayed"
            later = [mode + "+" * early] * (graph.num_commands - 1)
            assert [how for _, _, how in stub.launches()] == [mode, *later]


def test_graphs_that_cannot_join_leave_all_as_it_was(
    opened: Callable[..., tuple[Engine, list[Any]]], more: Path, stub: Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, requests = opened()
    with engine, Artifact(more) as extended:
        expected = drive(engine, requests[:1])
        for fails in ("MemAlloc=2", "MemHostAlloc=2", "GraphInstantiate=1"):
            stub.recover()
            monkeypatch.setenv("STUB_CUDA", fails)
            with pytest.raises(LlmcError, match=r"failed|can be pinned"):
                engine.add_graphs(extended)
            monkeypatch.delenv("STUB_CUDA")
            assert drive(engine, requests[:1]) == expected
