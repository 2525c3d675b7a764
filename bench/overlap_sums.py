"""What sums of ranks beside kernels save: two ranks in two network namespaces, joined at a given rate.

    python -m bench.overlap_sums ARTIFACT [--gbps 1] [--bucket prefill:1x1024] [--rounds 4] [--replays 4] [--json]

ARTIFACT is compiled with --tensor-parallel 2. Each rank has one thread; MPICH carries sums over TCP. A round runs steps
with `--overlap-sums off`, then with `auto`. Printed are a round's medians in milliseconds, their ratio, and the number
of rows from which on steps were cut. It needs root, `ip`, `tc` and MPICH's mpiexec.hydra.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.limited import HungError, run_limited
from llmc.runtime.graphs_checks import FormatError
from llmc.runtime.graphs_file import read_graphs

_HOSTS = ("llmc-bench-a", "llmc-bench-b")
_ADDRESSES = ("10.77.8.1", "10.77.8.2")
_BURST, _LATENCY = "256kb", "20ms"
_IP_S, _RUN_S = 60, 600
"""Seconds within which a setting of the link, and a run of two ranks, must have ended."""
# Enters the namespace of a host in place of ssh; options of ssh come before the address.
_ENTER = """#!/bin/sh
while [ $# -gt 0 ]; do
  case $1 in
    {0}) host={2}; shift; break;;
    {1}) host={3}; shift; break;;
    *) shift;;
  esac
done
exec ip netns exec $host sh -c "$*"
"""


@dataclass(frozen=True)
class Round:
    """Medians of one round, in milliseconds. least_rows: of a step that is cut; 0 if none is."""

    off_ms: float
    auto_ms: float
    least_rows: int

    @property
    def ratio(self) -> float:
        """Time with sums beside kernels, of the time without."""
        return self.auto_ms / self.off_ms


def _ip(*arguments: str) -> str:
    return subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True, timeout=_IP_S).stdout


@contextmanager
def joined_hosts(gbps: float) -> Iterator[None]:
    """Two network namespaces whose link has a rate. Raises CalledProcessError where the machine does not allow it."""
    ends = tuple(zip(_HOSTS, ("llmc-a", "llmc-b"), _ADDRESSES, strict=True))
    with ExitStack() as stack:
        for host, _, _ in ends:
            _ip("netns", "add", host)
            # Not one that was there: another run uses it.
            stack.callback(
                subprocess.run, ["ip", "netns", "del", host], check=False, capture_output=True, timeout=_IP_S
            )
        (first, link, _), (second, peer, _) = ends
        _ip("link", "add", link, "netns", first, "type", "veth", "peer", "name", peer, "netns", second)
        for host, device, address in ends:
            _ip("-n", host, "addr", "add", f"{address}/24", "dev", device)
            for one in ("lo", device):
                _ip("-n", host, "link", "set", one, "up")
            shaped = ("root", "tbf", "rate", f"{gbps:g}gbit", "burst", _BURST, "latency", _LATENCY)
            _ip("netns", "exec", host, "tc", "qdisc", "add", "dev", device, *shaped)
        deadline = time.monotonic() + _IP_S
        while any(_ip("-n", host, "-6", "addr", "show", "tentative") for host in _HOSTS):
            if time.monotonic() > deadline:
                raise HungError(f"the link between {' and '.join(_HOSTS)} is not up within {_IP_S} seconds")
            time.sleep(0.1)  # the link takes no packets of MPI yet
        yield


def mpi_command(mpiexec: str, launcher: Path, command: list[str]) -> list[str]:
    """One process in each namespace; mpiexec itself runs in the first one."""
    launcher.write_text(_ENTER.format(*_ADDRESSES, *_HOSTS))
    launcher.chmod(0o755)
    return [
        "ip", "netns", "exec", _HOSTS[0], mpiexec, "-launcher", "ssh", "-launcher-exec", str(launcher),
        "-disable-auto-cleanup", "-localhost", _ADDRESSES[0], "-hosts", ",".join(_ADDRESSES), "-ppn", "1", "-n", "2",
        # Both are on one machine, where UCX would take shared memory.
        "-genv", "UCX_TLS", "tcp,self", *command,
    ]  # fmt: skip


def replay(artifact: Path, bucket: str, overlap: str, replays: int) -> dict[str, Any]:
    """The median of a step's milliseconds on this rank, behind one step that is not counted. On ranks other than the
    first, this ends the process."""
    from llmc.runtime.binding import Artifact, Replayer
    from llmc.runtime.profile.steps import full_step

    tables = read_graphs(artifact)
    names = [one.name for one in tables.graphs]
    if bucket not in names:
        raise SystemExit(f"{artifact} has no graph {bucket}: use {', '.join(names)}")
    graph = names.index(bucket)
    model, step = tables.model, full_step(tables, tables.graphs[graph])
    blocks = step.num_blocks(model.block_size)
    with (
        Artifact(artifact) as opened,
        Replayer(opened, num_threads=1, num_blocks=blocks, overlap_sums=overlap) as replayer,
    ):
        times = []
        for _ in range(replays + 1):
            start = time.perf_counter()
            step.run(replayer, graph, model.block_size, model.vocab_size, seed=7)
            times.append((time.perf_counter() - start) * 1e3)
        return {"ms": statistics.median(times[1:]), "least_rows": replayer.device_stats().get("overlap_rows", 0)}


def measure(given: argparse.Namespace) -> list[Round]:
    """All rounds. Raises CalledProcessError, HungError and TimeoutExpired."""
    mpiexec = shutil.which("mpiexec.hydra")
    if mpiexec is None:
        raise SystemExit("mpiexec.hydra is not here: install MPICH")

    def run(folder: str, number: int, overlap: str) -> dict[str, Any]:
        rank = [sys.executable, "-m", "bench.overlap_sums", os.path.abspath(given.artifact), "--rank", overlap]
        rank += ["--bucket", given.bucket, "--replays", str(given.replays)]
        command = mpi_command(mpiexec, Path(folder) / "enter", rank)
        # mpiexec may lose its own connections when all ranks have ended well: what rank 0 has said counts.
        done = run_limited(f"round {number} of {given.rounds} with --overlap-sums {overlap}", command, _RUN_S)
        if not done.stdout.strip():
            raise SystemExit(f"the ranks have measured nothing: {done.stderr.strip()}")
        told: dict[str, Any] = json.loads(done.stdout)
        return told

    rounds = []
    with tempfile.TemporaryDirectory() as folder, joined_hosts(given.gbps):
        for number in range(1, given.rounds + 1):
            print(f"round {number} of {given.rounds}", file=sys.stderr)
            off, auto = run(folder, number, "off"), run(folder, number, "auto")
            rounds.append(Round(off["ms"], auto["ms"], auto["least_rows"]))
    return rounds


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.overlap_sums", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--gbps", type=float, default=1.0, metavar="X", help="rate of the link")
    parser.add_argument("--bucket", default="prefill:1x1024", metavar="NAME")
    parser.add_argument("--rounds", type=int, default=4, metavar="N")
    parser.add_argument("--replays", type=int, default=4, metavar="N", help="steps of a run")
    parser.add_argument("--json", action="store_true", help="all rounds")
    parser.add_argument("--rank", choices=("off", "auto"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank:
        print(json.dumps(replay(given.artifact, given.bucket, given.rank, given.replays)))
        return
    if given.rounds < 1 or given.replays < 1 or not given.gbps > 0:
        parser.error("--rounds and --replays need 1 or more, --gbps more than 0")
    # The namespaces go, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        read_graphs(given.artifact)  # before two ranks start
        rounds = measure(given)
    except subprocess.CalledProcessError as error:
        raise SystemExit(f"{' '.join(map(str, error.cmd[:6]))} … failed: {error.stderr or error.returncode}") from error
    except (FormatError, HungError, subprocess.TimeoutExpired) as error:
        raise SystemExit(str(error)) from error
    if given.json:
        print(json.dumps({"load_average": os.getloadavg(), "rounds": [asdict(one) for one in rounds]}))
        return
    print(f"load average {os.getloadavg()[0]:.1f}, {os.cpu_count()} CPUs")
    for one in rounds:
        cut = f"cut from {one.least_rows} rows on" if one.least_rows else "not cut"
        print(f"off {one.off_ms:8.1f} ms  auto {one.auto_ms:8.1f} ms  ratio {one.ratio:.2f}  {cut}")


if __name__ == "__main__":
    main()
