"""MPICH's mpiexec, which leaves the start of its proxies, one a host, to somebody else."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from io import BufferedReader
from typing import IO, cast

from llmc.runtime.die_with_parent import dying_with_this_process
from llmc.runtime.rank_placement.hosts import Host, PlacementError

_NAMES = ("mpiexec.hydra", "mpiexec.mpich", "mpiexec")
_LAUNCH, _LAUNCH_END, _PROXY_ID = "HYDRA_LAUNCH:", "HYDRA_LAUNCH_END", "--proxy-id"
_OWN_LINES = (
    b"[mpiexec@",
    b"YOUR APPLICATION TERMINATED WITH",
    b"This typically refers to a problem",
    b"Please see the FAQ page for debugging",
)
"""Beginnings of lines that mpiexec itself writes to stdout, between those of rank 0."""


def find_mpiexec() -> str:
    """The path of MPICH's mpiexec. Raises PlacementError where there is none, or only another MPI's."""
    others = []
    for name in _NAMES:
        path = shutil.which(name)
        if path is None:
            continue
        asked = subprocess.run([path, "--version"], capture_output=True, text=True, check=False)
        if "HYDRA build details" in asked.stdout:
            return path
        others.append(path)
    found = f"{others[0]} is not MPICH's" if others else "PATH has none"
    raise PlacementError(
        f"ranks on a Ray cluster are started by MPICH's mpiexec, and {found}: install MPICH on every node, or start "
        "the ranks with mpirun"
    )


def rank_output(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """What the ranks wrote: chunks of mpiexec's stdout without lines of its own, wherever a chunk ends."""
    begins_line, skips, held = True, False, b""
    for chunk in chunks:
        data, held = held + chunk, b""
        for line in re.split(rb"(?<=\n)", data):
            ends = line.endswith(b"\n")
            if begins_line and not ends and any(own.startswith(line) for own in _OWN_LINES):
                held = line  # the next chunk tells whose line it is
                continue
            skips |= begins_line and line.startswith(_OWN_LINES)
            if not skips:
                yield line
            begins_line, skips = ends, skips and not ends
    if held:
        yield held


class Mpiexec:
    """A running mpiexec. It ends when all ranks have ended, and is killed when this object or process ends."""

    def __init__(
        self,
        program: str,
        address: str,
        hosts: Sequence[Host],
        command: Sequence[str],
        *,
        stdin: IO[bytes] | int | None,
    ) -> None:
        """address: of this machine, for the hosts. command: of each rank. stdin: of rank 0."""
        num_ranks = sum(len(host.bundles) for host in hosts)
        names = ",".join(host.address for host in hosts for _ in host.bundles)
        # Without the clean-up, rank 0 has the time to say which rank has ended, and ends the others itself.
        flags = ["-launcher", "manual", "-disable-auto-cleanup", "-localhost", address, "-hosts", names]
        # A node's own GPUs count, and not those of this one.
        environment = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
        self._process = subprocess.Popen(
            dying_with_this_process([program, *flags, "-n", str(num_ranks), *command]),
            stdin=stdin,
            stdout=subprocess.PIPE,
            env=environment,
            start_new_session=True,  # Ctrl+C goes to this process, which passes it on
        )
        self._num_hosts = len(hosts)

    def proxies(self) -> list[list[str]]:
        """The command that must run on each host, in order. Raises PlacementError if mpiexec ends instead."""
        assert self._process.stdout is not None
        found: dict[int, list[str]] = {}
        other = ""
        for line in iter(self._process.stdout.readline, b""):
            text = line.decode("utf-8", "replace").strip()
            if text == _LAUNCH_END:
                break
            if not text.startswith(_LAUNCH):
                other = text or other
                continue
            words = shlex.split(text.removeprefix(_LAUNCH))
            found[int(words[words.index(_PROXY_ID) + 1])] = words
        if sorted(found) != list(range(self._num_hosts)):
            raise PlacementError(f"mpiexec has not said how to start its proxies: {other or 'see its message above'}")
        return [found[host] for host in range(self._num_hosts)]

    def relay(self, write: Callable[[bytes], object]) -> threading.Thread:
        """Starts a thread that passes on what rank 0 writes to its stdout, until all have ended."""
        thread = threading.Thread(target=self._relay, args=(write,), name="llmc-rank-output", daemon=True)
        thread.start()
        return thread

    def _relay(self, write: Callable[[bytes], object]) -> None:
        stdout = cast(BufferedReader, self._process.stdout)
        for data in rank_output(iter(stdout.read1, b"")):
            try:
                write(data)
            except OSError:  # its reader has left
                self.send(signal.SIGTERM)
                write = len

    def send(self, signum: int) -> None:
        """Sends a signal to all ranks. A second SIGINT kills them."""
        self._process.send_signal(signum)

    def poll(self) -> int | None:
        """The exit code, which combines those of all ranks; None while it runs."""
        return self._process.poll()

    def wait(self, most_s: float) -> None:
        """Waits for its end, that long at most."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(most_s)

    def close(self) -> None:
        """Kills it, and so its proxies and ranks, if it still runs."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
