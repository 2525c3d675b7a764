"""Weights of the host that are streamed to a GPU, ahead of the kernels that read them: with kernels on the host, behind
a driver that executes copies as late as it may, or as early.

So a kernel that does not wait for its weights reads others, and a copy that does not wait for the readers of what it
overwrites spoils theirs: both have other bits.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from llmc.buckets import Bucket
from llmc.compiler.extend import add_buckets
from llmc.graphs_format import FAMILIES, OPERAND_KINDS
from llmc.graphs_records import Tables
from llmc.runtime.binding import Artifact, Engine, LlmcError, Replayer
from llmc.runtime.graphs_file import read_graphs

from support.compiled import Pages, compile_tiny, replay
from support.cuda import Stub, fake_nvcc, kernels_on_host, stub_library
from support.engine_driver import Output, Request, bits, mixed_requests
from support.engine_driver import drive as drive_outputs
from support.late_arrivals import fail_by_chance
from support.tiny_models import make_tiny_model

LADDER = "prefill=[1]x[16],decode=[1,4]x[128],mixed=[4]x[12]"
TARGET = "cuda:sm_80,sm_90+dependent"
BLOCK = 16
ALL_MIB, LARGE_MIB = 1, 1
"""More than the model has: all that may be is on the host; and a ring for all of it."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("streamed")
    stub_library(folder)
    return folder


@pytest.fixture(scope="module")
def artifact(folder: Path, kernel_cache: Path) -> Path:
    """Its embedding is the output's matrix: a weight that steps read both in place and whole."""
    model = make_tiny_model(folder / "model", "llama", num_hidden_layers=3, tie_word_embeddings=True)
    with fake_nvcc(folder):
        compile_tiny(
            model, folder / "artifact", kernel_cache, buckets=LADDER, dtype="f32", target=TARGET, block_size=BLOCK
        ).close()
    return folder / "artifact"


@pytest.fixture(scope="module")
def more(folder: Path, artifact: Path, kernel_cache: Path) -> Path:
    """The same with another graph, whose kernels are new."""
    with fake_nvcc(folder):
        add_buckets(artifact, [Bucket.parse("prefill:2x16")], folder / "more", cache_dir=kernel_cache, jobs=1)
    kernels_on_host(folder / "more", folder)
    return folder / "more"


@pytest.fixture
def stub(folder: Path, more: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stub]:
    """At the end of a test there was no mistake, and all is given back."""
    monkeypatch.setenv("STUB_CUDA_KERNELS", str(folder / "kernels.so"))
    monkeypatch.setenv("LLMC_CUDA_LIBRARY", str(folder / "libstub_cuda.so"))
    stub = Stub(folder / "libstub_cuda.so")
    yield stub
    assert stub.report() == ""
    stub.recover()


@pytest.fixture
def opened(artifact: Path, stub: Stub) -> Callable[..., Engine]:
    def open_one(**options: Any) -> Engine:
        with Artifact(artifact) as given:
            return Engine(given, **{"num_blocks": 40, **options})

    return open_one


def largest(artifact: Artifact, phase: str) -> int:
    """Index of a phase's graph with the most tokens."""
    graphs = artifact.graphs()
    return max((i for i, one in enumerate(graphs) if one.phase == phase), key=lambda i: graphs[i].max_tokens)


def requests_of() -> list[Request]:
    """Greedy and seeded, n > 1, penalties, a shared prefix: few tokens of each."""
    return [(prompt[:40], replace(params, max_tokens=8)) for prompt, params in mixed_requests()[:4]]


def drive(engine: Engine, requests: list[Request]) -> list[list[tuple[Any, ...]]]:
    def bits_of(outputs: list[Output]) -> list[tuple[Any, ...]]:
        return [bits(output) for output in outputs]

    return list(map(bits_of, drive_outputs(engine, requests)))


@pytest.fixture(scope="module")
def known() -> dict[str, list[list[tuple[Any, ...]]]]:
    return {}


@pytest.fixture
def resident(
    opened: Callable[..., Engine], known: dict[str, list[list[tuple[Any, ...]]]]
) -> list[list[tuple[Any, ...]]]:
    """The requests' bits where the GPU has all weights."""
    if not known:
        with opened() as engine:
            known["bits"] = drive(engine, requests_of())
            assert engine.stats.device["streamed_weight_bytes"] == engine.stats.device["offload_ring_bytes"] == 0
    return known["bits"]


def streamed(tables: Tables, graph: int, *, most: int) -> int:
    """Bytes of the weights that a step of the graph streams, none of which has more than `most`."""
    total, before = 0, set[int]()
    for command in tables.commands_of(tables.graphs[graph]):
        if FAMILIES[command.family] != "linear":
            continue
        operands = tables.operands_of(command)
        read = {o.index for o in operands if OPERAND_KINDS[o.kind] == "weight"}
        read = {index for index in read if sum(size > 1 for size in tables.weights[index].shape) > 1}
        sizes = [tables.weights[index].bytes for index in read]
        if sum(sizes) <= most and not read <= before:
            total, before = total + sum(sizes), read
    return total


@pytest.mark.parametrize("facts", ["", "ahead=1", "capability=80", "capability=80 ahead=1"])
@pytest.mark.parametrize("ring", [{}, {"offload_ring_mib": LARGE_MIB}, {"offload_ring_mib": 0}], ids=str)
@pytest.mark.parametrize("how", [{}, {"eager": True}, {"graph_mib": 2}], ids=str)
def test_bits_are_those_of_resident_weights(
    how: dict[str, Any],
    ring: dict[str, int],
    facts: str,
    opened: Callable[..., Engine],
    resident: list[list[tuple[Any, ...]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In graphs, in launches, and where both take turns; while steps overlap, and as kernels begin early or do not."""
    monkeypatch.setenv("STUB_CUDA", facts)
    with opened(offload_mib=ALL_MIB, **how, **ring) as engine:
        assert drive(engine, requests_of()) == resident
        stats = engine.stats.device
        assert engine.stats.num_ahead_steps > 0
    assert stats["dependent_launches"] == ("80" not in facts)
    assert (stats["recorded_graphs"] > 0) == ("eager" not in how)
    assert (stats["launched_graphs"] > 0) == (how != {})
    assert 0 < stats["offloaded_weight_bytes"] < stats["weight_bytes"]
    assert (
        (stats["streamed_weight_bytes"] > 0) == (stats["offload_ring_bytes"] > 0) == (ring != {"offload_ring_mib": 0})
    )


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("ring_mib", [None, LARGE_MIB])
def test_a_step_copies_each_weight_once(
    ring_mib: int | None, eager: bool, artifact: Path, stub: Stub, folder: Path
) -> None:
    """The fitting ring has two loads, the largest ones that follow each other, and at most a quarter of all that is on
    the host. So the output's matrix is read in place."""
    tables, before = read_graphs(artifact), 0
    with Artifact(artifact) as given:
        replayer = Replayer(given, num_blocks=4, offload_mib=ALL_MIB, offload_ring_mib=ring_mib, eager=eager)
    with replayer:
        pages = Pages(3, BLOCK)
        for graph in (0, 1, 0):
            replay(replayer, graph, pages, [(0, [3], 0)])
            stats = replayer.device_stats()
            ring = stats["offload_ring_bytes"]
            copied, before = stats["streamed_weight_bytes"] - before, stats["streamed_weight_bytes"]
            assert 0 < copied == streamed(tables, graph, most=ring)
    sizes = {weight.name: weight.bytes for weight in tables.weights}
    fitting = sizes["layers.0.mlp.gate_up.weight"] + sizes["layers.0.mlp.down.weight"]
    assert ring == (LARGE_MIB << 20 if ring_mib else fitting)


def test_commands_that_run_alone_have_their_weights(artifact: Path, stub: Stub) -> None:
    tables, logits = read_graphs(artifact), set[bytes]()
    commands = tables.commands_of(tables.graphs[0])
    output = tables.operands_of(commands[-1])[-1]
    assert OPERAND_KINDS[output.kind] == "output"
    ways: list[dict[str, Any]] = [{}, {"offload_mib": ALL_MIB}, {"offload_mib": ALL_MIB, "offload_ring_mib": LARGE_MIB}]
    for options in ways:
        with Artifact(artifact) as given, Replayer(given, num_blocks=4, **options) as replayer:
            logits.add(replay(replayer, 0, Pages(3, BLOCK), [(0, [3, 4, 5], 0)]).tobytes())
            replayer.begin(
                0,
                input_ids=[6, 7, 8], positions=[0, 1, 2], slot_mapping=[BLOCK, BLOCK + 1, BLOCK + 2],
                block_tables=[[1]], context_lens=[3], query_start=[0, 3], sample_index=[2],
            )  # fmt: skip
            for command in range(len(commands)):
                replayer.run_command(command)
            found = replayer.read_operand(len(commands) - 1, tables.operands_of(commands[-1]).index(output), 4 * 515)
            logits.add(found.tobytes())
    assert len(logits) == 2


@pytest.mark.parametrize("eager", [False, True])
def test_graphs_that_join_share_the_ring(
    eager: bool,
    opened: Callable[..., Engine],
    resident: list[list[tuple[Any, ...]]],
    more: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("STUB_CUDA", "ahead=1")
    with opened(offload_mib=ALL_MIB, eager=eager) as engine, Artifact(more) as extended:
        assert drive(engine, requests_of()) == resident
        ring = engine.stats.device["offload_ring_bytes"]
        for index in engine.add_graphs(extended):
            engine.enable_graph(index, True)
        assert drive(engine, requests_of()) == resident
        assert engine.stats.device["offload_ring_bytes"] == ring


def test_graphs_join_beside_steps(
    opened: Callable[..., Engine],
    resident: list[list[tuple[Any, ...]]],
    more: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first run of a new graph is enqueued by another thread, and uses the ring, too."""
    monkeypatch.setenv("STUB_CUDA", "ahead=1 pause_us=20")
    for _ in range(3):
        # No kernel begins early: copies of the other thread may be between two kernels.
        engine = opened(offload_mib=ALL_MIB, eager=True, dependent_launches=False)
        with engine, Artifact(more) as extended, ThreadPoolExecutor(1) as pool:
            joins, found = pool.submit(engine.add_graphs, extended), list[list[list[tuple[Any, ...]]]]()
            while not joins.done():
                found.append(drive(engine, requests_of()))
            assert len(joins.result()) == 1
        assert found
        assert all(one == resident for one in found)


def test_calls_that_fail_by_chance(
    opened: Callable[..., Engine], resident: list[list[tuple[Any, ...]]], stub: Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step whose copies or kernels were enqueued in part only leaves nothing behind that spoils the next one."""
    requests = [(prompt, params, 0) for prompt, params in requests_of()]
    for eager in (False, True):
        reasons, failed = list[str](), stub.num_failed()
        with opened(num_blocks=20, max_num_seqs=4, offload_mib=ALL_MIB, eager=eager, graph_mib=2) as engine:
            for order in ("", "ahead=1 ", "ahead=2 "):

                def tell(what: str, order: str = order) -> None:
                    monkeypatch.setenv("STUB_CUDA", order + what)

                reasons += fail_by_chance(engine, requests, resident, tell, one_in=3000 if eager else 1000)
        assert 0 < reasons.count("error") < len(reasons)
        assert stub.num_failed() > failed + 3


def test_copies_of_a_step_that_failed_spoil_no_later_one(
    artifact: Path, stub: Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever call of a launched step fails, copies that were enqueued before have ended when a graph is replayed."""
    monkeypatch.setenv("STUB_CUDA", "ahead=2")
    with Artifact(artifact) as given:
        launched, recorded = largest(given, "prefill"), largest(given, "decode")
        replayer = Replayer(given, num_blocks=4, offload_mib=ALL_MIB, graph_mib=1, graph_order=str(recorded))
    with replayer:
        assert replayer.device_stats()["recorded_graphs"] == 1
        pages, num_failed = Pages(3, BLOCK), 0
        stub.launches()
        expected = replay(replayer, recorded, pages, [(0, [3], 0)]).tobytes()
        assert {how for _, _, how in stub.launches()} == {"replayed", "replayed+"}
        for call in itertools.count(1):
            before = stub.num_failed()
            monkeypatch.setenv("STUB_CUDA", f"ahead=2 only={call} code=2")
            with contextlib.suppress(LlmcError):
                replay(replayer, launched, pages, [(1, [3, 4, 5], 0)])
            if stub.num_failed() == before:
                break
            num_failed += 1
            monkeypatch.setenv("STUB_CUDA", "ahead=2")
            assert replay(replayer, recorded, pages, [(0, [3], 0)]).tobytes() == expected, call
    assert num_failed > 60
