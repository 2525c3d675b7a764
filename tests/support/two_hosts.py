"""Two hosts on one machine: network namespaces whose link is a program, which delays packets and can be cut.

Run as a program it is the launcher of mpirun's hydra, which enters the namespace of a host in place of ssh.
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import os
import select
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

HOSTS = ("llmc-a", "llmc-b")
ADDRESSES = ("10.77.7.1", "10.77.7.2")
_NEW_NET, _SET_INTERFACE, _TAP_WITHOUT_HEADER = 0x40000000, 0x400454CA, 0x1002
_LONGEST_FRAME = 2048


def _enter(namespace: int) -> None:
    """Moves the calling thread. Raises OSError."""
    if ctypes.CDLL(None, use_errno=True).setns(namespace, _NEW_NET) != 0:
        raise OSError(ctypes.get_errno(), "setns")


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


class TwoHosts:
    """Hosts `HOSTS` with `ADDRESSES`, for as long as it is open. Raises OSError and CalledProcessError where the
    machine does not allow it."""

    def __init__(self) -> None:
        self.delay_s = 0.0
        """That each packet takes."""
        self.cut = False
        """Whether packets are lost, all of them."""
        self.num_frames = 0
        self._ends: list[int] = []
        self._stop = False
        self._thread = threading.Thread(target=self._carry, daemon=True)

    def __enter__(self) -> TwoHosts:
        try:
            for host, address in zip(HOSTS, ADDRESSES, strict=True):
                _ip("netns", "add", host)
                self._ends.append(self._tap(host))
                for arguments in (
                    ["addr", "add", f"{address}/24", "dev", "link"],
                    ["link", "set", "dev", "link", "up"],
                ):
                    _ip("-n", host, *arguments)
                _ip("-n", host, "link", "set", "dev", "lo", "up")
        except BaseException:
            self._remove()
            raise
        self._thread.start()
        return self

    def __exit__(self, *of_exception: object) -> None:
        self._stop = True
        self._thread.join()
        self._remove()

    def _remove(self) -> None:
        for end in self._ends:
            os.close(end)
        for host in HOSTS:
            subprocess.run(["ip", "netns", "del", host], check=False, capture_output=True)

    @staticmethod
    def _tap(host: str) -> int:
        """The file of interface `link` in a namespace: what is written to it arrives there."""
        home = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        inside = os.open(f"/run/netns/{host}", os.O_RDONLY)
        try:
            _enter(inside)
            end = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
            fcntl.ioctl(end, _SET_INTERFACE, struct.pack("16sH", b"link", _TAP_WITHOUT_HEADER))
        finally:
            _enter(home)
            os.close(home)
            os.close(inside)
        return end

    def _carry(self) -> None:
        """Frames of one end to the other, in order, each after its delay."""
        on_the_way: list[tuple[float, int, int, bytes]] = []
        others = dict(zip(self._ends, reversed(self._ends), strict=True))
        while not self._stop:
            wait = 0.05 if not on_the_way else max(0.0, min(0.05, on_the_way[0][0] - time.monotonic()))
            for end in select.select(self._ends, [], [], wait)[0]:
                frame = os.read(end, _LONGEST_FRAME)
                self.num_frames += 1
                heapq.heappush(on_the_way, (time.monotonic() + self.delay_s, self.num_frames, others[end], frame))
            while on_the_way and on_the_way[0][0] <= time.monotonic():
                _, _, to, frame = heapq.heappop(on_the_way)
                if not self.cut:
                    os.write(to, frame)


def mpi_command(mpiexec: str, folder: Path, command: Sequence[str]) -> list[str]:
    """One process on each host; mpiexec itself runs on the first one. folder: for a script and
    the file of hosts."""
    launcher = folder / "enter"
    launcher.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{Path(__file__).resolve()}" "$@"\n')
    launcher.chmod(0o755)
    hosts = folder / "hosts"
    hosts.write_text("".join(f"{address}:1\n" for address in ADDRESSES))
    return [
        "ip", "netns", "exec", HOSTS[0], mpiexec, "-launcher", "ssh", "-launcher-exec", str(launcher),
        "-disable-auto-cleanup", "-localhost", ADDRESSES[0], "-f", str(hosts), "-n", "2",
        # Both are on one machine, where UCX would take shared memory.
        "-genv", "UCX_TLS", "tcp,self", *command,
    ]  # fmt: skip


def main() -> None:
    """`two_hosts.py [options of ssh] ADDRESS COMMAND…`."""
    arguments = sys.argv[1:]
    at = next(i for i, argument in enumerate(arguments) if argument in ADDRESSES)
    host = HOSTS[ADDRESSES.index(arguments[at])]
    command = " ".join(arguments[at + 1 :])
    os.execvp("ip", ["ip", "netns", "exec", host, "sh", "-c", command])


if __name__ == "__main__":
    main()
