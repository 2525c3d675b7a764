"""Ranks on a Ray cluster of two nodes: their bits, a node that is lost, and what is left behind."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from llmc.runtime.rank_placement.hosts import PlacementError

from support.live_server import serving
from support.processes import descendants, gone, until

ray_cluster = pytest.importorskip("ray.cluster_utils", reason="llmc's extra `ray` is not installed")
pytestmark = pytest.mark.exhaustive
LLMC = [sys.executable, "-P", "-m", "llmc.cli.main"]
ON_RAY = ["--threads", "1", "--distributed-executor", "ray"]
PROMPT = ["--prompt", "w5 w6 w7 w8 w9 w10 w11", "--max-tokens", "12", "--temperature", "0", "-q"]
SECOND = "127.0.0.2"
PATIENCE_S = 300.0  # only a hang takes that long


@pytest.fixture
def cluster() -> Iterator[Any]:
    """Two nodes with a CPU each, the second with an address of its own, as if on another machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "disabled")
        made = ray_cluster.Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
        made.second = made.add_node(num_cpus=1, node_ip_address=SECOND)
        patch.setenv("RAY_ADDRESS", made.address)
        yield made
        made.shutdown()


def free_cpus(cluster: Any) -> float:
    import ray

    ray.init(address=cluster.address, log_to_driver=False)
    try:
        return float(ray.available_resources().get("CPU", 0.0))
    finally:
        ray.shutdown()


def test_ranks_on_two_nodes_have_the_bits_of_one_host(
    cluster: Any, artifacts: dict[int, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    alone, placed = (
        subprocess.run([*LLMC, "run", artifacts[2], *PROMPT, *more], capture_output=True, text=True, check=True)
        for more in ([], ON_RAY)
    )
    assert placed.stdout == alone.stdout
    assert f"rank 1 on {SECOND}" in placed.stderr
    until(lambda: free_cpus(cluster) == 2.0, PATIENCE_S)
    from llmc.runtime.rank_placement import cluster as module

    monkeypatch.setattr(module, "_HERE_S", 0.5)
    monkeypatch.setattr(module, "_ANYWHERE_S", 0.5)
    with (
        pytest.raises(
            PlacementError, match=r"no room for 4 ranks of 1 CPUs within 0\.5 s: its nodes have 1 CPUs, 1 CPUs"
        ),
        module.ray_placement(4, cpus=1, gpus=0, spread=False),
    ):
        pass


def test_a_lost_node_is_told_and_nothing_is_left(cluster: Any, artifacts: dict[int, Path]) -> None:
    with serving(artifacts[2], *ON_RAY, "--skip-warmup", fails=True) as server:
        log = "".join(server.log)
        ranks = [int(pid) for pid in re.findall(r"rank 1 of 2 is process (\d+)", log)]
        assert ranks
        ranks += descendants(server.process.pid)
        cluster.remove_node(cluster.second, allow_graceful=False)
        lost = time.monotonic()
        until(lambda: "Ray has lost" in "".join(server.log))
        assert time.monotonic() - lost < 5
    log = "".join(server.log)
    assert f"rank 1 of 2, on {SECOND}: Ray has lost" in log
    until(lambda: all(map(gone, ranks)))


def test_a_killed_rank_is_told_within_five_seconds(cluster: Any, artifacts: dict[int, Path]) -> None:
    with serving(artifacts[2], *ON_RAY, "--skip-warmup", fails=True) as server:
        (victim,) = (int(pid) for pid in re.findall(r"rank 1 of 2 is process (\d+)", "".join(server.log)))
        ranks = [victim, *descendants(server.process.pid)]
        statuses: list[int] = []

        def ask() -> None:
            body = {"prompt": "w5 w6", "max_tokens": 60, "ignore_eos": True}
            with contextlib.suppress(OSError):  # the server is gone
                while not statuses or statuses[-1] == 200:
                    statuses.append(server.ask("POST", "/v1/completions", body).status)

        clients = [threading.Thread(target=ask) for _ in range(4)]
        for client in clients:
            client.start()
        until(lambda: len(statuses) > 8)
        os.kill(victim, signal.SIGKILL)
        killed = time.monotonic()
        until(lambda: "Rank 1 of 2 has failed" in "".join(server.log))
        assert time.monotonic() - killed < 5
        for client in clients:
            client.join(PATIENCE_S)
            assert not client.is_alive()
    assert re.search(r"Rank 1 of 2 has failed: .*process \d+", "".join(server.log)), "".join(server.log)
    until(lambda: all(map(gone, ranks)))
    assert free_cpus(cluster) == 2.0


def test_ctrl_c_ends_all_ranks(cluster: Any, artifacts: dict[int, Path]) -> None:
    before = set(descendants(os.getpid()))
    with serving(artifacts[2], *ON_RAY, "--skip-warmup") as server:
        assert server.ask("POST", "/v1/completions", {"prompt": "w5 w6", "max_tokens": 4}).status == 200
        os.kill(server.process.pid, signal.SIGINT)
        assert server.process.wait(PATIENCE_S) == 0
    assert free_cpus(cluster) == 2.0
    until(lambda: not [pid for pid in set(descendants(os.getpid())) - before if b"llmc.cli" in _words(pid)])


def _words(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
