"""Servers and batches on the cuda device, whose driver fails what a test names."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from llmc.runtime.llm import LLM
from llmc.runtime.params import SamplingParams
from llmc.runtime.server import engine_thread

from support.cuda import Stub, stub_library
from support.cuda_device import checked_stub, two_buckets
from support.server_harness import running_server


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return stub_library(tmp_path_factory.mktemp("stub"))


@pytest.fixture
def stub(library: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stub]:
    with checked_stub(library, monkeypatch) as stub:
        yield stub


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory, kernel_cache: Path) -> Path:
    return two_buckets(tmp_path_factory, kernel_cache)


def test_a_server_notices_what_happens_to_an_idle_device(
    artifact: Path, stub: Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_thread, "_CHECK_DEVICE_S", 0.05)
    with running_server(artifact, device_options={"cuda_library": str(stub.library)}) as running:
        time.sleep(0.3)
        assert running.client.get("/health").json() == {"status": "ok"}
        monkeypatch.setenv("STUB_CUDA", "EventQuery=214")
        end = time.monotonic() + 30
        while (health := running.client.get("/health")).status_code == 200 and time.monotonic() < end:
            time.sleep(0.02)
        assert (health.status_code, health.json()["status"]) == (503, "failed")
        assert "memory has an error that cannot be corrected" in health.json()["error"]
    stub.recover()


def test_a_server_tells_the_truth_about_its_device(artifact: Path, stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without memory it fails what runs, and goes on; a lost device is the end, and /health says so."""
    with running_server(artifact, device_options={"cuda_library": str(stub.library)}) as running:
        body = {"prompt": [3, 4, 5], "max_tokens": 2, "ignore_eos": True}
        assert running.post("/v1/completions", **body).status_code == 200
        for _ in range(4):
            stub.recover()
            monkeypatch.setenv("STUB_CUDA", "GraphLaunch=2")
            refused = running.post("/v1/completions", **body)
            assert (refused.status_code, "the GPU has no memory left" in refused.text) == (500, True)
            assert running.client.get("/health").json() == {"status": "ok"}
            monkeypatch.setenv("STUB_CUDA", "")
            assert running.post("/v1/completions", **body).status_code == 200
        assert running.engine.thread.steps.num_failed == 4
        monkeypatch.setenv("STUB_CUDA", "StreamSynchronize=700")
        refused = running.post("/v1/completions", **body)
        assert "the GPU is lost to this process: restart it" in refused.json()["error"]["message"]
        health = running.client.get("/health")
        assert (health.status_code, health.json()["status"]) == (503, "failed")
        assert "an address that is not its own (CUDA error 700)" in health.json()["error"]
        assert running.post("/v1/completions", **body).status_code == 503


def test_a_batch_goes_on_behind_a_failed_step(artifact: Path, stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    """One sequence at a time: the first has no memory, and its failure is told before the second one runs."""
    monkeypatch.setenv("LLMC_CUDA_LIBRARY", str(stub.library))
    params = SamplingParams(max_tokens=2, ignore_eos=True)
    with LLM(artifact) as llm:
        monkeypatch.setenv("STUB_CUDA", "GraphLaunch=2")
        outputs = llm.generate([[3, 4, 5], [6, 7]], params, on_output=lambda *_: monkeypatch.setenv("STUB_CUDA", ""))
    assert [one.error and one.error.code for one in outputs] == ["out_of_memory", None]
    assert [len(one.outputs[0].token_ids) for one in outputs] == [0, 2]


def test_a_server_names_the_graphs_that_it_launches(
    artifact: Path, stub: Stub, caplog: pytest.LogCaptureFixture
) -> None:
    for options, says in (({"graph_mib": 1}, True), ({"eager": True}, False)):
        caplog.clear()
        given = {"cuda_library": str(stub.library), **options}
        with running_server(artifact, device_options=given) as running:
            assert "llmc_graphs_launched 1.0" in running.client.get("/metrics").text or not says
        assert ("1 of 2 graphs run as launches of kernels" in caplog.text) == says
        assert ("have no room on the device (prefill:1x16)" in caplog.text) == says


def test_without_memory_for_long_a_server_gives_up(artifact: Path, stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    with running_server(artifact, device_options={"cuda_library": str(stub.library)}) as running:
        monkeypatch.setenv("STUB_CUDA", "GraphLaunch=2")
        for _ in range(3):
            assert running.client.get("/health").status_code == 200
            running.post("/v1/completions", prompt=[3, 4, 5], max_tokens=2)
        assert running.client.get("/health").status_code == 503
