"""`llmc deploy` on a Ray cluster of two nodes.

One is killed, another artifact takes over, replicas come and go with the load; no client sees it.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from support.live_router import SERVE_FLAGS, ask_all
from support.long_prompts import alone, requests, total
from support.paths import ROOT
from support.processes import descendants, gone, until

ray_cluster = pytest.importorskip("ray.cluster_utils", reason="llmc's extra `ray` is not installed")
pytestmark = pytest.mark.exhaustive
PATIENCE_S = 300.0  # only a hang takes that long


class Deployment:
    """What a client sees of it."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"

    def replicas(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = httpx.get(f"{self.url}/v1/llmc/replicas", timeout=PATIENCE_S).json()["data"]
        return [one for one in found if one["state"] == "ready"]

    def until(self, count: int, *, other_than: frozenset[str] = frozenset()) -> list[dict[str, Any]]:
        """Waits for so many replicas that take requests, of other artifacts."""
        end = time.monotonic() + PATIENCE_S
        while len(found := [one for one in self.replicas() if one["artifact"] not in other_than]) != count:
            assert time.monotonic() < end, found
            time.sleep(0.2)
        return found

    def text(self, seed: int) -> str:
        """A stream, to its end."""
        body = {"prompt": f"It is {seed}", "max_tokens": 250, "temperature": 0.9, "seed": seed, "ignore_eos": True}
        pieces: list[str] = []
        ended = None
        with httpx.stream(
            "POST", f"{self.url}/v1/completions", json={**body, "model": "tiny", "stream": True}, timeout=PATIENCE_S
        ) as answer:
            assert answer.status_code == 200
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line.removeprefix("data: "))
                    pieces += [choice["text"] for choice in event["choices"]]
                    ended = event["choices"][0]["finish_reason"]
        assert ended == "length"
        return "".join(pieces)

    def begin(self, count: int) -> tuple[list[threading.Thread], dict[int, str]]:
        """Streams in threads, and where their texts go."""
        texts: dict[int, str] = {}

        def ask(seed: int) -> None:
            texts[seed] = self.text(seed)

        threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(count)]
        for thread in threads:
            thread.start()
        return threads, texts


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    os.environ["RAY_AUTH_MODE"] = "disabled"
    made = ray_cluster.Cluster(initialize_head=True, head_node_args={"num_cpus": 2})
    made.second = made.add_node(num_cpus=2)
    yield made
    made.shutdown()


@pytest.fixture(scope="module")
def port() -> int:
    """A free one: a cluster's Serve keeps its first."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        found: int = free.getsockname()[1]
    return found


def run(cluster: Any, artifact: Path, port: int, *more: str) -> None:
    """`llmc deploy`, which returns when all replicas are ready."""
    flags = ["--cpus-per-replica", "1", "--port", str(port), "--serve-flags", SERVE_FLAGS, "--keep", *more]
    subprocess.run(
        [sys.executable, "-m", "llmc.cli.main", "deploy", artifact, "--address", cluster.address, *flags],
        check=True, timeout=PATIENCE_S, cwd=ROOT, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def test_ray_accepts_the_files_for_serve() -> None:
    schema = pytest.importorskip("ray.serve.schema").ServeDeploySchema
    folder = ROOT / "deploy" / "ray"
    inner = yaml.safe_load((folder / "kuberay.yaml").read_text())["spec"]["serveConfigV2"]
    for text in ((folder / "serve.yaml").read_text(), inner):
        stated = yaml.safe_load(text)
        (application,) = schema.model_validate(stated).applications
        assert application.args["artifacts"] == ["/models/qwen.llmc"]
        with pytest.raises(ValueError, match="proxy_location"):
            schema.model_validate({**stated, "proxy_location": "Head"})


def test_replicas_come_and_go_with_the_load(cluster: Any, english_artifact: Path, port: int) -> None:
    run(cluster, english_artifact, port, "--max-replicas", "3", "--target-load", "2", "--down-delay", "5")
    deployment = Deployment(port)
    deployment.until(1)
    enough = threading.Event()
    texts: list[str] = []
    with pytest.raises(subprocess.CalledProcessError) as refused:
        run(cluster, english_artifact, port + 1)
    assert f"Ray Serve listens at 127.0.0.1:{port} of that cluster already" in refused.value.stderr

    def ask() -> None:
        while not enough.is_set():
            texts.append(deployment.text(1))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    deployment.until(3)
    enough.set()
    for thread in threads:
        thread.join()
    deployment.until(1)
    assert len(set(texts)) == 1


def test_a_node_is_killed_and_an_artifact_exchanged(
    cluster: Any, english_artifact: Path, port: int, tmp_path: Path
) -> None:
    run(cluster, english_artifact, port, "--replicas", "2")
    deployment = Deployment(port)
    deployment.until(2)
    threads, undisturbed = deployment.begin(16)
    for thread in threads:
        thread.join()
    assert len(undisturbed) == 16

    threads, texts = deployment.begin(16)
    end = time.monotonic() + PATIENCE_S
    while not any(one["active_requests"] for one in deployment.replicas()):
        assert time.monotonic() < end
        time.sleep(0.01)
    cluster.remove_node(cluster.second, allow_graceful=False)
    for thread in threads:
        thread.join()
    assert texts == undisturbed
    cluster.add_node(num_cpus=2)
    old = deployment.until(2)[0]["artifact"]

    # Another artifact under the same path and name: its manifest differs.
    other = tmp_path / "artifact"
    shutil.copytree(english_artifact, other)
    manifest = other / "manifest.json"
    manifest.write_text(manifest.read_text() + "\n")
    threads, texts = deployment.begin(16)
    run(cluster, other, port, "--replicas", "2")
    for thread in threads:
        thread.join()
    assert texts == undisturbed
    deployment.until(2, other_than=frozenset({old}))
    assert deployment.text(3) == undisturbed[3]
    until(lambda: len(_replica_processes(os.getpid())) == 2, PATIENCE_S)  # also of replicas that were numbered anew


def test_prefill_replicas_compute_long_prompts(cluster: Any, english_artifact: Path, port: int) -> None:
    """The answers are those of one server, also when the prefill replica is killed; Ray starts another one."""
    asked = requests(0) + requests(8)
    wanted = alone(english_artifact, asked)
    run(cluster, english_artifact, port, "--replicas", "1", "--prefill-replicas", "1", "--hand-over-chars", "100")
    deployment = Deployment(port)

    def of_role(role: str) -> list[dict[str, Any]]:
        return [one for one in deployment.replicas() if one["role"] == role]

    until(lambda: [len(of_role(role)) for role in ("decode", "prefill", "both")] == [1, 1, 0], PATIENCE_S)
    assert ask_all(deployment.url, asked[:8]) == wanted[:8]
    received = r'llmc_handovers_total\{replica="[^"]*",direction="received"\}'
    assert total(deployment.url, received) == 8
    (killed,) = of_role("prefill")
    (pid,) = (
        pid for pid in _replica_processes(os.getpid()) if b"\0prefill\0" in Path(f"/proc/{pid}/cmdline").read_bytes()
    )
    os.kill(pid, signal.SIGKILL)
    assert ask_all(deployment.url, asked[8:]) == wanted[8:]
    until(lambda: [one["name"] != killed["name"] for one in of_role("prefill")] == [True], PATIENCE_S)


def test_a_lost_head_ends_streams_and_replicas(english_artifact: Path) -> None:
    """Clients see their streams break off at once; replicas end with their nodes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_gcs_rpc_server_reconnect_timeout_s", "5")  # a minute by default
        made = ray_cluster.Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
        node = made.add_node(num_cpus=2)
    try:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        run(made, english_artifact, port)
        deployment = Deployment(port)
        deployment.until(1)
        wanted = deployment.text(1)
        (raylet,) = (info.process.pid for info in node.all_processes["raylet"])
        replicas = _replica_processes(raylet)
        assert len(replicas) == 1
        lost: list[Exception] = []

        def ask() -> None:
            try:
                while True:
                    assert deployment.text(1) == wanted
            except httpx.TransportError as error:
                lost.append(error)

        threads = [threading.Thread(target=ask) for _ in range(4)]
        for thread in threads:
            thread.start()
        time.sleep(0.5)
        made.remove_node(made.head_node, allow_graceful=False)
        for thread in threads:
            thread.join(PATIENCE_S)
        assert len(lost) == 4
        until(lambda: all(map(gone, replicas)), PATIENCE_S)
    finally:
        made.shutdown()


def _replica_processes(ancestor: int) -> list[int]:
    """Of `llmc serve`, among the descendants of a process."""
    found = []
    for pid in descendants(ancestor):
        with contextlib.suppress(OSError):
            if b"\0serve\0" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
    return found
