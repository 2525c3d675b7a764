"""Engines and servers on an OpenCL device: what the others are tested for, on one artifact with everything."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmc.buckets import Bucket
from llmc.cli.main import main
from llmc.compiler.extend import add_buckets
from llmc.runtime.adapters.adapters import Adapters
from llmc.runtime.adapters.tensors import AdapterError
from llmc.runtime.binding import Artifact, Engine, LlmcError, SamplingParams
from llmc.runtime.opening import decide_budget
from llmc.runtime.server import engine_thread
from llmc.runtime.server.run import open_engine
from llmc.runtime.warm_up.budget import BudgetOptions, size_order
from llmc.units import format_bytes

from support.adapter_setting import Setting, drive, with_tokenizer
from support.engine_driver import mixed_requests
from support.inspected import inspected_text
from support.late_arrivals import arrive_late, fail_by_chance
from support.opencl import failing_library, needs_opencl, opencl_setting, program_cache
from support.server_harness import make_config, running_server
from support.serving_imports import loaded_by_serving

pytestmark = needs_opencl
NAMES = (None, "a", "b", "c", "b", None, "a", "c", "b")
CROWDED = {"num_blocks": 14, "max_num_seqs": 4, "swap_bytes": 1 << 19, "swap_always": 1}


@pytest.fixture(scope="session")
def setting(tmp_path_factory: pytest.TempPathFactory, kernel_cache: Path) -> Setting:
    return opencl_setting(tmp_path_factory, kernel_cache)


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Options of engines: what the driver has built is kept for the run."""
    return {"program_cache": str(program_cache(tmp_path_factory))}


@pytest.fixture(scope="module")
def failing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return failing_library(tmp_path_factory.mktemp("failing"))


@pytest.fixture(scope="module")
def with_adapters(setting: Setting, programs: dict[str, Any]) -> Callable[..., tuple[Engine, list[Any]]]:
    """Opens an engine with the adapters of NAMES, and says the requests that it gets."""

    def opened(**options: Any) -> tuple[Engine, list[Any]]:
        with Artifact(setting.artifact) as artifact:
            engine = Engine(artifact, **{**programs, **options})
            adapters = Adapters(setting.artifact, artifact, engine)
            numbers = {name: adapters.load(name, setting.adapters[name]).id for name in "cab"}
        requests = zip(mixed_requests(), NAMES, strict=True)
        return engine, [(prompt, params, numbers.get(name or "", 0)) for (prompt, params), name in requests]

    return opened


@pytest.fixture(scope="module")
def alone(with_adapters: Callable[..., tuple[Engine, list[Any]]]) -> list[list[tuple[Any, ...]]]:
    """Each request by itself, launched kernel by kernel, with weights on the host."""
    engine, requests = with_adapters(eager=True, prefix_cache=0, offload_mib=1, overlap=False)
    assert 0 < engine.stats.device["offloaded_weight_bytes"] <= engine.stats.device["weight_bytes"]
    with engine:
        drawn = [drive(engine, [request])[0] for request in requests]
        assert engine.stats.num_ahead_steps == 0
    return drawn


@pytest.mark.parametrize("tiny_pool", [False, True])
def test_bits_do_not_depend_on_company(
    tiny_pool: bool,
    with_adapters: Callable[..., tuple[Engine, list[Any]]],
    alone: list[list[tuple[Any, ...]]],
) -> None:
    """Batches, chunks, mixed steps, slots, prefix cache, preemption, recorded graphs."""
    options = {"num_blocks": 10, "max_num_seqs": 8} if tiny_pool else {"num_blocks": 100, "max_tokens_per_step": 17}
    engine, requests = with_adapters(**options)
    rng = np.random.default_rng(tiny_pool)
    with engine:
        for _ in range(2):  # the second round starts with a warm prefix cache
            order = [int(i) for i in rng.permutation(len(requests))]
            found = drive(engine, [requests[i] for i in order])
            assert found == [alone[i] for i in order]
        stats = engine.stats
    assert tiny_pool == (stats.num_preemptions > 0)
    assert stats.num_mixed_steps > 0
    assert stats.prefix_hit_tokens > 0
    assert stats.num_ahead_steps >= stats.device["chained_steps"] > 0
    assert stats.num_free_blocks == stats.num_blocks


def test_a_budget_of_the_devices_memory(setting: Setting, programs: dict[str, Any]) -> None:
    """PoCL's memory is the host's, and no graph is dropped."""
    with Artifact(setting.artifact) as artifact:
        graphs, budget = artifact.graphs(), decide_budget(artifact, BudgetOptions(0.5, 0.01, 0.25), 0, programs)
    assert budget is not None
    assert budget.dropped == ()
    assert budget.recordings is not None
    assert abs(budget.recordings.mib / 4 - budget.recordings.prompt_mib) < 1
    assert budget.device_options["graph_order"] == ",".join(map(str, size_order(graphs)))
    whole = sum(graph.num_commands for graph in graphs)
    assert f"recordings of all graphs: about {format_bytes(4096 * whole)}" in inspected_text(setting.artifact)


def test_blocks_that_were_swapped_have_their_bits(
    with_adapters: Callable[..., tuple[Engine, list[Any]]], alone: list[list[tuple[Any, ...]]]
) -> None:
    """Those that the host's memory has no room for are computed again."""
    for swap_bytes, prefix_cache in ((1 << 17, 1), (1 << 20, 0)):
        engine, requests = with_adapters(
            num_blocks=10, max_num_seqs=8, swap_bytes=swap_bytes, swap_always=1, prefix_cache=prefix_cache
        )
        with engine:
            assert drive(engine, requests) == alone
            stats = engine.stats
        assert stats.num_preemptions > 0
        assert stats.device["saved_blocks"] >= stats.device["loaded_blocks"] > 0


def test_bits_of_requests_that_arrive_late(
    with_adapters: Callable[..., tuple[Engine, list[Any]]], alone: list[list[tuple[Any, ...]]]
) -> None:
    """Some weights are on the host."""
    engine, requests = with_adapters(**CROWDED, offload_mib=1)
    with engine:
        assert arrive_late(engine, requests, 1) == dict(enumerate(alone))
        stats = engine.stats
    assert stats.num_free_blocks == stats.num_blocks
    assert stats.num_evictions > 0
    assert stats.num_thrown_rows > 0
    assert stats.device["loaded_blocks"] > 0


def test_graphs_that_the_driver_replays_once_at_a_time_or_not_at_all(
    with_adapters: Callable[..., tuple[Engine, list[Any]]],
    alone: list[list[tuple[Any, ...]]],
    failing: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A graph has two recordings where one that runs cannot be enqueued again. A budget has room for two of five, which
    leave less than a graph, or for those of decode and one of prompts. A driver has no memory for more than one, or
    records none."""
    limits, every = {"graph_mib": 1, "graph_prompt_mib": 1, "graph_order": "4,0"}, [0, 1, 2, 3, 4]
    for orders, given, launched in (
        ("replays=0", {}, []),
        ("replays=0", limits, [1, 2, 3]),
        ("replays=0", limits | {"graph_prompt_mib": 0}, [0, 1]),
        ("replays=0 CreateCommandBuffer@3=-4", {}, [0, 1, 3, 4]),
        ("extensions=0", {}, every),
    ):
        monkeypatch.setenv("FAILING_OPENCL", orders)
        engine, requests = with_adapters(opencl_library=str(failing), **given)
        with engine:
            assert drive(engine, requests[:4]) == alone[:4]
            counted, graphs = engine.stats.device, engine.graph_stats()
        assert [index for index, graph in enumerate(graphs) if graph.launched] == launched
        assert counted["launched_graphs"] == len(launched) == len(graphs) - counted["recorded_graphs"]
        assert (counted["replayed_steps"] > 0) == (launched != every) == (counted["replay_host_ns"] > 0)
        assert (counted["launched_steps"] > 0) == bool(launched) == (counted["launch_host_ns"] > 0)
        assert counted["chained_steps"] > 0


def test_devices_that_lack_one_thing(
    with_adapters: Callable[..., tuple[Engine, list[Any]]],
    alone: list[list[tuple[Any, ...]]],
    failing: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No subgroups, no double precision, so that the host draws tokens, or no half precision, which no program uses.
    Answers are the same."""
    for lacks in ("subgroups", "fp64", "fp16", "command_buffers"):
        monkeypatch.setenv("FAILING_OPENCL", f"{lacks}=0")
        # Programs are built, not those that the device built with all that it has.
        kept = {} if lacks == "command_buffers" else {"program_cache": str(tmp_path / lacks)}
        engine, requests = with_adapters(opencl_library=str(failing), **kept)
        with engine:
            assert drive(engine, requests[:4]) == alone[:4]
            counted = engine.stats.device
        assert (counted["recorded_graphs"] == 0) == (lacks == "command_buffers")


def test_nothing_is_built_once_an_engine_is_ready(
    with_adapters: Callable[..., tuple[Engine, list[Any]]],
    alone: list[list[tuple[Any, ...]]],
    failing: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """From then on, the driver builds no program: requests notice nothing, and another engine cannot be opened."""
    for eager in (False, True):
        engine, requests = with_adapters(opencl_library=str(failing), eager=eager)
        monkeypatch.setenv("FAILING_OPENCL", "BuildProgram=-6")
        with engine:
            assert drive(engine, requests[:4]) == alone[:4]
        with pytest.raises(LlmcError, match=r"Building .*kernels\.cl on '.*' failed: the host has no memory left"):
            with_adapters(opencl_library=str(failing))
        monkeypatch.delenv("FAILING_OPENCL")


def test_a_server_says_that_the_driver_records_no_graphs(
    setting: Setting,
    programs: dict[str, Any],
    failing: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Once, unless somebody asked for launches."""
    monkeypatch.setenv("FAILING_OPENCL", "command_buffers=0")
    for eager in (False, True):
        caplog.clear()
        options = {**programs, "opencl_library": str(failing), "eager": eager}
        open_engine(make_config(setting.artifact, device_options=options)).close()
        told = [record.getMessage() for record in caplog.records if "launches of kernels" in record.getMessage()]
        sentence = (
            "5 of 5 graphs run as launches of kernels, and their steps are slower: the driver records none, since it "
            "lacks cl_khr_command_buffer; use a newer driver"
        )
        assert told == ([] if eager else [sentence])


def test_the_serving_process_never_loads_torch_or_tvm(
    setting: Setting, programs: dict[str, Any], chat_artifact: Path, tmp_path: Path
) -> None:
    """Nor llmc's compiler: programs are text, which the driver builds."""
    assert loaded_by_serving(with_tokenizer(setting, tmp_path, chat_artifact).artifact, **programs) == set()


def test_commands_say_that_the_driver_records_no_graphs(
    setting: Setting,
    programs: dict[str, Any],
    chat_artifact: Path,
    failing: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("LLMC_OPENCL_LIBRARY", str(failing))
    monkeypatch.setenv("LLMC_CACHE_DIR", str(tmp_path))
    (tmp_path / "opencl").symlink_to(programs["program_cache"])
    artifact = str(with_tokenizer(setting, tmp_path, chat_artifact).artifact)
    run = ["run", artifact, "--prompt", "x", "--max-tokens", "1"]
    lacks = "without command buffers (cl_khr_command_buffer), each kernel of a step is launched by itself"
    launched = "graphs run as launches of kernels, and their steps are slower: the driver records none"
    for orders, times in (("command_buffers=0", 1), ("replays=1", 0)):
        monkeypatch.setenv("FAILING_OPENCL", orders)
        for command in (["devices"], ["inspect", artifact]):
            assert main(command) == 0
            assert capsys.readouterr().out.count(lacks) == times
    monkeypatch.setenv("FAILING_OPENCL", "command_buffers=0")
    for options, times in (([], 1), (["--enforce-eager"], 0)):
        assert main([*run, *options]) == 0
        assert capsys.readouterr().err.count(launched) == times


def test_calls_that_fail_by_chance(
    with_adapters: Callable[..., tuple[Engine, list[Any]]],
    alone: list[list[tuple[Any, ...]]],
    failing: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Refused calls, and commands that fail on the device: requests of these steps fail, and no other; nothing hangs.
    What was answered until then has its bits, also by the prefix cache and swap space that are left."""
    engine, requests = with_adapters(opencl_library=str(failing), **CROWDED)
    with engine:
        reasons = fail_by_chance(engine, requests, alone, partial(monkeypatch.setenv, "FAILING_OPENCL"), one_in=150)
    assert 5 < reasons.count("error") < len(reasons) - 5


def test_an_adapter_that_cannot_be_copied(
    setting: Setting, programs: dict[str, Any], failing: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It alone fails, and its slot is free again."""
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    with Artifact(setting.artifact) as artifact, Engine(artifact, opencl_library=str(failing), **programs) as engine:
        adapters = Adapters(setting.artifact, artifact, engine)
        engine.submit([5, 6, 7], params)
        assert engine.step()
        for orders in ("EnqueueWriteBuffer@2=-5 once=1", "EnqueueWriteBuffer@1=-5 once=1 late=-14"):
            for name in "abc":
                monkeypatch.setenv("FAILING_OPENCL", f"{orders} seed={ord(name)}")
                with pytest.raises(AdapterError, match="Copying an adapter"):
                    adapters.load(name, setting.adapters[name])
        numbers = {name: adapters.load(name, setting.adapters[name]).id for name in "abc"}
        while engine.step():
            pass
        assert sum(event.kind == "token" for event in engine.poll()) == 4
        assert drive(engine, [([5, 6, 7], params, numbers["b"])])[0][0][-1] == "length"


def test_a_step_runs_again_if_the_host_has_to_draw(setting: Setting, programs: dict[str, Any]) -> None:
    """The 1024 likeliest of 9001 tokens do not reach top_p, which is known when the next step is on its way."""
    params = SamplingParams(temperature=2.0, top_p=0.99, max_tokens=6, ignore_eos=True, seed=3)
    requests = [([5, 6, 7], params, 0), ([8, 9], replace(params, temperature=0.0), 0)]
    found = []
    for overlap in (False, True):
        with Artifact(setting.artifact) as artifact, Engine(artifact, overlap=overlap, **programs) as engine:
            found.append(drive(engine, requests))
            counted = engine.stats.device
        # The steps after a repeated one are not chained.
        assert (counted["chained_steps"], counted["repeated_steps"]) == (overlap, overlap)
        assert counted["drawn_on_host"] == 6
    assert found[0] == found[1]


@pytest.mark.slow
def test_graphs_that_join(
    setting: Setting,
    with_adapters: Callable[..., tuple[Engine, list[Any]]],
    alone: list[list[tuple[Any, ...]]],
    kernel_cache: Path,
    tmp_path: Path,
) -> None:
    """Larger than those before, so that what graphs work on grows; slots, KV blocks and programs stay."""
    new = [Bucket.parse("decode:4x128"), Bucket.parse("prefill:8x32")]
    add_buckets(setting.artifact, new, tmp_path / "more", cache_dir=kernel_cache, jobs=1)
    engine, requests = with_adapters()
    with engine, Artifact(tmp_path / "more") as more:
        half = drive(engine, requests[:4])
        before = len(engine.graph_stats())
        joined = engine.add_graphs(more)
        for index in range(before):
            engine.enable_graph(index, False)
        for index in joined:
            engine.enable_graph(index, True)
        rest = drive(engine, requests[4:])
        stats = engine.graph_stats()
    assert half + rest == alone
    assert all(stats[index].replays > 0 for index in joined)


def test_a_server(
    setting: Setting,
    programs: dict[str, Any],
    chat_artifact: Path,
    tmp_path: Path,
    failing: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """HTTP from end to end: text, a stream, logprobs, chat, an adapter. Then a step fails, and the device is lost."""
    monkeypatch.setattr(engine_thread, "_CHECK_DEVICE_S", 3600.0)  # it might take the error that a step is to have
    served = with_tokenizer(setting, tmp_path, chat_artifact)
    options = {**programs, "opencl_library": str(failing)}
    with running_server(served.artifact, device_options=options, lora=(("b", served.adapters["b"]),)) as server:
        body = {"prompt": [5, 6, 7], "max_tokens": 8, "temperature": 0, "ignore_eos": True, "logprobs": 2}
        whole = server.post("/v1/completions", model="tiny", **body).json()["choices"][0]
        other = server.post("/v1/completions", model="b", **body).json()["choices"][0]
        events = server.events("/v1/completions", model="tiny", **body)
        answer = server.chat("hello", max_tokens=4)
        monkeypatch.setenv("FAILING_OPENCL", "EnqueueReadBuffer@1=-14 once=1")
        failed = server.post("/v1/completions", model="tiny", **body)
        assert (failed.status_code, failed.json()["error"]["code"]) == (500, "device_failed")
        assert server.client.get("/health").json() == {"status": "ok"}
        assert "llmc_failed_steps_total 1.0" in server.client.get("/metrics").text
        again = server.post("/v1/completions", model="tiny", **body).json()["choices"][0]
        assert again == whole
        # While nothing runs, a single refusal of a driver is no loss.
        failures = ctypes.CDLL(str(failing)).failing_opencl_failures
        failures.restype, before = ctypes.c_uint64, failures()
        monkeypatch.setenv("FAILING_OPENCL", "EnqueueReadBuffer@1=-5 once=1")
        server.engine.call_between_steps(partial(server.engine.engine.check_device, 60.0))
        assert failures() == before + 1
        monkeypatch.setenv("FAILING_OPENCL", "EnqueueReadBuffer=-5")
        refused = server.post("/v1/completions", model="tiny", **body)
        assert "is lost to this process: restart it" in refused.json()["error"]["message"]
        health = server.client.get("/health")
        assert (health.status_code, health.json()["status"]) == (503, "failed")
        assert "the device is out of resources (-5)" in health.json()["error"]
        assert server.post("/v1/completions", model="tiny", **body).status_code == 503
        monkeypatch.delenv("FAILING_OPENCL")
    assert "".join(event["choices"][0]["text"] for event in events if event.get("choices")) == whole["text"]
    assert len(whole["logprobs"]["tokens"]) == 8
    assert whole["logprobs"] != other["logprobs"]
    assert answer["usage"]["completion_tokens"] <= 4
