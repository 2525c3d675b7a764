"""Adapters in the engine: bits in any company, the prefix cache, and who keeps a slot how long."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmc.buckets import Bucket
from llmc.compiler.extend import add_buckets
from llmc.runtime.adapters.adapters import Adapters
from llmc.runtime.binding import Artifact, Engine, LlmcError, SamplingParams
from llmc.runtime.binding.adapter_matrices import AdapterMatrix

from support.adapter_setting import RANK, SLOTS, Setting, drive
from support.engine_driver import Output, bits, mixed_requests, random_ids

NAMES = (None, "a", "b", "c", "b", None, "a", "c", "b")


@pytest.fixture(scope="module")
def alone(setting: Setting) -> list[list[tuple[Any, ...]]]:
    """Each request with its adapter in an engine that has nothing else."""
    found = []
    for (prompt, params), name in zip(mixed_requests(), NAMES, strict=True):
        with Artifact(setting.artifact) as artifact, Engine(artifact, num_threads=1) as engine:
            adapters = Adapters(setting.artifact, artifact, engine)
            number = 0 if name is None else adapters.load(name, setting.adapters[name]).id
            found += drive(engine, [(prompt, params, number)])
    return found


@pytest.mark.parametrize("trial", range(8))
def test_bits_do_not_depend_on_company(trial: int, setting: Setting, alone: list[list[tuple[Any, ...]]]) -> None:
    """Batches, chunks, slots, prefix cache, preemption, threads; equal prompts share no block between adapters."""
    rng = np.random.default_rng(trial)
    requests, tiny_pool = mixed_requests(), trial % 4 == 1
    with (
        Artifact(setting.artifact) as artifact,
        Engine(
            artifact,
            num_threads=1 + trial % 3,
            num_blocks=10 if tiny_pool else 100,
            max_num_seqs=8 if tiny_pool else int(rng.choice([1, 3, 8])),
            max_tokens_per_step=int(rng.choice([0, 3, 10, 17])),
            prefix_cache=int(trial % 4 != 2),
        ) as engine,
    ):
        adapters = Adapters(setting.artifact, artifact, engine)
        for name in rng.permutation(["a", "b", "c"]):
            adapters.load(str(name), setting.adapters[str(name)])
        for _ in range(2):  # the second round starts with a warm prefix cache
            order = [int(i) for i in rng.permutation(len(requests))]
            found = drive(engine, [(*requests[i], adapters.id_of(NAMES[i])) for i in order])
            for i, one in zip(order, found, strict=True):
                assert one == alone[i], f"request {i}"
        stats = engine.stats
    assert tiny_pool == (stats.num_preemptions > 0)
    assert (stats.prefix_hit_tokens > 0) == (trial % 4 != 2)
    assert stats.num_free_blocks == stats.num_blocks


def test_adapters_share_no_block(setting: Setting) -> None:
    prompt, params = random_ids(1, 40), SamplingParams(temperature=0.0, max_tokens=1)
    with Artifact(setting.artifact) as artifact, Engine(artifact) as engine:
        adapters = Adapters(setting.artifact, artifact, engine)
        first = adapters.load("a", setting.adapters["a"]).id
        hits = []
        for number in (0, first, 0, first):
            before = engine.stats.prefix_hit_tokens
            drive(engine, [(prompt, params, number)])
            hits.append(engine.stats.prefix_hit_tokens - before)
        assert hits == [0, 0, 32, 32]
        # One that is loaded again under its name is another one.
        adapters.unload("a")
        again = adapters.load("a", setting.adapters["b"]).id
        assert again != first
        before = engine.stats.prefix_hit_tokens
        (found,) = drive(engine, [(prompt, params, again)])
        assert engine.stats.prefix_hit_tokens == before
    with Artifact(setting.artifact) as artifact, Engine(artifact) as engine:
        number = Adapters(setting.artifact, artifact, engine).load("b", setting.adapters["b"]).id
        assert drive(engine, [(prompt, params, number)]) == [found]


def test_a_request_keeps_its_adapter(setting: Setting) -> None:
    """Until it has ended, in whatever way; then the slot is free."""
    prompt, params = random_ids(2, 20), SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, num_logprobs=0)
    with Artifact(setting.artifact) as artifact, Engine(artifact) as engine:
        adapters = Adapters(setting.artifact, artifact, engine)
        number = adapters.load("b", setting.adapters["b"]).id
        expected = drive(engine, [(prompt, params, number)])
        for extra in range(SLOTS - 1):
            adapters.load(f"more{extra}", setting.adapters["a"])
        running = engine.submit(prompt, params, adapter=number)
        assert engine.step()
        adapters.unload("b")
        with pytest.raises(LlmcError, match=rf"Adapter {number} is not loaded") as refused:
            engine.submit(prompt, params, adapter=number)
        assert refused.value.name == "not_found"
        matrix = AdapterMatrix(1, 0, 1.0, np.ones((1, 60), np.float32), np.ones((60, 1), np.float32))
        with pytest.raises(LlmcError, match=rf"All {SLOTS} slots of adapters are taken") as full:
            engine.load_adapter([matrix])
        assert full.value.name == "queue_full"
        output = Output()
        while engine.step():
            engine.check_integrity()
            for event in engine.poll():
                assert event.request_id == running or event.kind == "finished"
                if event.kind == "token":
                    output.ids.append(event.token_id)
                    output.logprobs.append(event.logprob)
                    output.top.append(event.top_logprobs)
                else:
                    output.reason = event.finish_reason
        assert bits(output)[:2] == expected[0][0][:2]
        # One that is cancelled gives it back, too.
        again = engine.load_adapter([matrix])
        cancelled = engine.submit(prompt, params, adapter=again)
        engine.unload_adapter(again)
        engine.cancel(cancelled)
        engine.step()
        engine.poll()
        engine.check_integrity()
        engine.load_adapter([matrix])
        with pytest.raises(LlmcError, match="is not loaded"):
            engine.unload_adapter(again)


def test_loading_beside_steps_changes_nothing(setting: Setting, alone: list[list[tuple[Any, ...]]]) -> None:
    requests = mixed_requests()
    with Artifact(setting.artifact) as artifact, Engine(artifact, num_threads=2) as engine:
        adapters = Adapters(setting.artifact, artifact, engine)
        for name in "bc":
            adapters.load(name, setting.adapters[name])
        stopping = threading.Event()
        failures: list[BaseException] = []

        def come_and_go() -> None:
            try:
                while not stopping.is_set():
                    adapters.load("other", setting.adapters["a"])
                    adapters.unload("other")
            except BaseException as error:
                failures.append(error)

        thread = threading.Thread(target=come_and_go)
        thread.start()
        try:
            which = [i for i, name in enumerate(NAMES) if name != "a"]
            found = drive(engine, [(*requests[i], adapters.id_of(NAMES[i])) for i in which])
        finally:
            stopping.set()
            thread.join()
    assert not failures
    assert found == [alone[i] for i in which]


def test_graphs_that_join_read_the_same_slots(
    setting: Setting, alone: list[list[tuple[Any, ...]]], kernel_cache: Path, tmp_path: Path
) -> None:
    add_buckets(setting.artifact, [Bucket.parse("decode:4x64")], tmp_path / "more", cache_dir=kernel_cache, jobs=1)
    requests, short = mixed_requests(), [2, 6]  # whose contexts fit the new graph
    with Artifact(setting.artifact) as artifact, Engine(artifact) as engine, Artifact(tmp_path / "more") as more:
        adapters = Adapters(setting.artifact, artifact, engine)
        for name in "abc":
            adapters.load(name, setting.adapters[name])
        for index in range(len(artifact.graphs())):
            engine.enable_graph(index, artifact.graphs()[index].phase == "prefill")
        for index in engine.add_graphs(more):
            engine.enable_graph(index, True)
        found = drive(engine, [(*requests[i], adapters.id_of(NAMES[i])) for i in short])
        assert found == [alone[i] for i in short]
        assert engine.graph_stats()[-1].replays > 0


@pytest.mark.parametrize(
    ("matrix", "why"),
    [
        ((99, 0, 1, 60, 60), "is of part 0 of layer 99"),
        ((0, 5, 1, 60, 60), "is of part 5 of layer 0"),
        ((1, 0, RANK + 1, 60, 60), f"has rank {RANK + 1}; use 1 to {RANK}"),
    ],
)
def test_matrices_that_do_not_fit(matrix: tuple[int, ...], why: str, setting: Setting) -> None:
    """As a program in C would give them: Python's own checks come before."""
    import ctypes

    from llmc.runtime.binding import abi
    from llmc.runtime.binding.handle import call

    linear, part, rank, columns, rows = matrix
    a, b = np.zeros((rank, columns), np.float32), np.zeros((rows, rank), np.float32)
    native = (abi.AdapterMatrix * 1)()
    native[0].struct_size = ctypes.sizeof(abi.AdapterMatrix)
    native[0].linear, native[0].part, native[0].rank, native[0].scale = linear, part, rank, 1.0
    native[0].a, native[0].b = (x.ctypes.data_as(abi.F32P) for x in (a, b))
    number = ctypes.c_uint64()
    with Artifact(setting.artifact) as artifact, Engine(artifact) as engine:
        with pytest.raises(LlmcError, match=why):
            call("llmc_engine_load_adapter", engine.pointer, native, 1, ctypes.byref(number))
        with pytest.raises(LlmcError, match="has no matrices"):
            call("llmc_engine_load_adapter", engine.pointer, native, 0, ctypes.byref(number))


def test_an_artifact_without_room(llama: tuple[Path, Artifact]) -> None:
    with Engine(llama[1]) as engine:
        assert llama[1].adapter_linears() == []
        with pytest.raises(LlmcError, match="is not loaded"):
            engine.submit([3], adapter=1)
