"""Time to more replicas: from 1 to N on a Ray cluster of this machine, as `llmc deploy` does it.

    python -m bench.scale_up ARTIFACT [--replicas 4] [--rounds 3] [--json]

It needs the extra `ray`. A deployment of one replica is changed to N, and the clock runs until the endpoint gives
requests to all of them; then it is changed back. In turn with that, `llmc serve` starts once, and a router with N
replicas of its own (`llmc route --spawn N`); the clock runs from the command until all are ready. Medians and ranges
over the rounds are printed.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from bench.route_chaos import replicas_of, routed

_LLMC = [sys.executable, "-P", "-c", "import sys; from llmc.cli.main import main; sys.exit(main())"]
_NAME = "scale-up"
_FLAGS = ["--threads", "1", "--kv-bytes", "256MiB"]
_LOOK_S, _PATIENCE_S = 0.01, 300.0


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

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = int(free.getsockname()[1])

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


def measure(artifact: str, replicas: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of each round, by what was started."""
    names = ("llmc serve", f"llmc route --spawn {replicas}", f"Ray, 1 to {replicas}")
    found: dict[str, list[float]] = {name: [] for name in names}
    with deployed(artifact, replicas + 2) as scale:
        for _ in range(rounds):
            seconds = (serve_s(artifact), route_s(artifact, replicas), scale(replicas))
            for times, one in zip(found.values(), seconds, strict=True):
                times.append(one)
            scale(1)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.scale_up", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("artifact")
    parser.add_argument("--replicas", type=int, default=4, metavar="N")
    parser.add_argument("--rounds", type=int, default=3, metavar="N")
    parser.add_argument("--json", action="store_true", help="seconds of each round")
    given = parser.parse_args()
    if given.replicas < 2 or given.rounds < 1:
        parser.error("--replicas needs 2 or more, --rounds 1 or more")
    found: dict[str, Any] = measure(os.path.abspath(given.artifact), given.replicas, given.rounds)
    if given.json:
        print(json.dumps(found, indent=1))
        return
    for name, times in found.items():
        print(f"{name:<22} {statistics.median(times):5.2f} s ({min(times):.2f}–{max(times):.2f})")


if __name__ == "__main__":
    main()
