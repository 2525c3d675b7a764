"""Time to more replicas: from 1 to N on a Ray cluster of this machine, as `llmc deploy` does it.

    python -m bench.scale_up ARTIFACT [--replicas 4] [--rounds 3] [--vllm FOLDER] [--json]

It needs the extra `ray`. A deployment of one replica is changed to N, and the clock runs until the endpoint gives
requests to all of them; then it is changed back. In turn with that, `llmc serve` starts once, and a router with N
replicas of its own (`llmc route --spawn N`); the clock runs from the command until all are ready. Medians and ranges
over the rounds are printed.

--vllm: also vLLM's server, of the checkpoint --vllm-model: the first one, then N - 1 more at once beside it. FOLDER is
that of `python -m bench.peers install --engines vllm --models NAME --folder FOLDER`. One start that fills the cache of
compiled code goes before and is not counted.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, redirect_stdout, suppress
from pathlib import Path

from bench.peers.engines.vllm import Vllm
from bench.peers.environment import Skip, Workspace
from bench.peers.plan import Settings
from bench.peers.process import PeerError, server
from bench.peers.runner import free_port
from bench.route_chaos import replicas_of, routed

_LLMC = [sys.executable, "-P", "-c", "import sys; from llmc.cli.main import main; sys.exit(main())"]
_NAME = "scale-up"
_FLAGS = ["--threads", "1", "--kv-bytes", "256MiB"]
_LOOK_S, _PATIENCE_S = 0.01, 300.0
# Servers side by side must not share the first CPU.
_ANY_CPU = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}


def await_replicas(url: str, count: int) -> None:
    """Waits for exactly so many replicas that take requests. Raises RuntimeError if they do not come."""
    import httpx

    end = time.monotonic() + _PATIENCE_S
    while time.monotonic() < end:
        with suppress(httpx.HTTPError, KeyError, ValueError):
            if sum(one["state"] == "ready" for one in replicas_of(url)) == count:
                return
        time.sleep(_LOOK_S)
    raise RuntimeError(f"there were not {count} replicas after {_PATIENCE_S:g} s")


@contextmanager
def deployed(artifact: str, cpus: int) -> Iterator[Callable[[int], float]]:
    """A deployment of one replica on a cluster with so many CPUs, whatever the machine has. The function scales it to
    a number of replicas, and returns the seconds until they take requests."""
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    import ray
    from ray import serve

    from llmc.runtime.deploy.application import NAMESPACE, application
    from llmc.runtime.deploy.config import DeployConfig

    port = free_port()

    def scale(count: int) -> float:
        start = time.perf_counter()
        config = DeployConfig(
            artifacts=(artifact,), min_replicas=count, max_replicas=count, serve_flags=tuple(_FLAGS), stop_s=10.0
        )
        serve.run(application(_NAME, config), name=_NAME, route_prefix="/", blocking=False)
        await_replicas(f"http://127.0.0.1:{port}", count)
        return time.perf_counter() - start

    ray.init(num_cpus=cpus, namespace=NAMESPACE, log_to_driver=False, logging_level="ERROR")
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port, "location": "HeadOnly"})
        scale(1)
        yield scale
    finally:
        serve.shutdown()
        ray.shutdown()


def serve_s(artifact: str) -> float:
    """Seconds from the command `llmc serve` until it is ready. Raises RuntimeError."""
    start = time.perf_counter()
    command = [*_LLMC, "serve", "--port", "0", artifact, *_FLAGS]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        ready = any(line.startswith("llmc: ready: ") for line in process.stderr)
        seconds = time.perf_counter() - start
        process.terminate()
        process.stderr.read()
    if not ready:
        raise RuntimeError("llmc serve did not get ready: run it by hand to see why")
    return seconds


def route_s(artifact: str, replicas: int) -> float:
    """Seconds from the command `llmc route` until all its replicas are ready."""
    start = time.perf_counter()
    with routed(artifact, replicas, ["--serve-flags", " ".join(_FLAGS)]):
        return time.perf_counter() - start


class VllmServers:
    """Servers of vLLM with a thread each, of a checkpoint that bench.peers made below `folder`. Their output is in its
    logs. Raises Skip and PeerError."""

    def __init__(self, folder: Path, model: str) -> None:
        settings = Settings(threads=1, prefills=(128,), batches=(8,), streams=8)
        self._engine = Vllm(Workspace(folder.resolve(), 1), settings)
        self._engine.install()
        self._variant = self._engine.variants[0]
        self._prepared = self._engine.prepare(model, self._variant)
        with self.started(1):
            pass  # what it compiles is cached

    @contextmanager
    def started(self, count: int, first: int = 0) -> Iterator[float]:
        """So many servers, started at once: seconds until all are ready. first: number of the first one's log."""
        start = time.perf_counter()
        with ExitStack() as running, ThreadPoolExecutor(count) as pool:
            for entered in [pool.submit(self._start, running, first + one) for one in range(count)]:
                entered.result()
            yield time.perf_counter() - start

    def seconds(self, replicas: int) -> tuple[float, float]:
        """Of one server, and of the others beside it."""
        with self.started(1) as alone, self.started(replicas - 1, first=1) as more:
            return alone, more

    def _start(self, running: ExitStack, number: int) -> None:
        port = free_port()
        command = self._engine.server(self._prepared, self._variant, port)
        assert command is not None
        command = dataclasses.replace(command, environment={**command.environment, **_ANY_CPU})
        log = self._engine.workspace.log(f"scale-up-vllm-{number}")
        running.enter_context(server(command, f"http://127.0.0.1:{port}", log))


def measure(artifact: str, replicas: int, rounds: int, vllm: VllmServers | None = None) -> dict[str, list[float]]:
    """Seconds of each round, by what was started."""
    found: dict[str, list[float]] = {}

    def note(**seconds: float) -> None:
        for name, one in seconds.items():
            found.setdefault(name, []).append(one)

    for number in range(rounds):
        print(f"round {number + 1} of {rounds}", file=sys.stderr)
        note(**{"llmc serve": serve_s(artifact), f"llmc route --spawn {replicas}": route_s(artifact, replicas)})
        with deployed(artifact, replicas + 2) as scale:
            note(**{f"Ray, from 1 to {replicas}": scale(replicas)})
        if vllm is not None:
            alone, more = vllm.seconds(replicas)
            note(**{"vLLM, one server": alone, f"vLLM, from 1 to {replicas}": more})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.scale_up", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("artifact")
    parser.add_argument("--replicas", type=int, default=4, metavar="N")
    parser.add_argument("--rounds", type=int, default=3, metavar="N")
    parser.add_argument("--vllm", type=Path, metavar="FOLDER", help="of bench.peers: vLLM's servers, too")
    parser.add_argument("--vllm-model", default="qwen2.5-0.5b", metavar="NAME", help="the checkpoint that vLLM serves")
    parser.add_argument("--json", action="store_true", help="seconds of each round")
    given = parser.parse_args()
    if given.replicas < 2 or given.rounds < 1:
        parser.error("--replicas needs 2 or more, --rounds 1 or more")
    # What is running is ended, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        vllm = VllmServers(given.vllm, given.vllm_model) if given.vllm is not None else None
        with redirect_stdout(sys.stderr):  # Ray writes its workers' lines to the output
            found = measure(os.path.abspath(given.artifact), given.replicas, given.rounds, vllm)
    except (Skip, PeerError, RuntimeError) as error:
        raise SystemExit(str(error)) from error
    if given.json:
        print(json.dumps(found, indent=1))
        return
    for name, times in found.items():
        print(f"{name:<22} {statistics.median(times):5.2f} s ({min(times):.2f}–{max(times):.2f})")


if __name__ == "__main__":
    main()
