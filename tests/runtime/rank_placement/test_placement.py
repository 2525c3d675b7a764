"""Commands as ranks on several hosts: MPICH's mpiexec starts them through a placement, here one without Ray."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from llmc.runtime.die_with_parent import dying_with_this_process
from llmc.runtime.rank_placement.hosts import Host, HostEnd, PlacementError, hosts_of
from llmc.runtime.rank_placement.mpiexec import find_mpiexec, rank_output
from llmc.runtime.rank_placement.run import run_placed

from support.processes import descendants, gone, until


class LocalPlacement:
    """Hosts that are all this machine, under several of its addresses."""

    def __init__(self, *addresses: str) -> None:
        self.address = "127.0.0.1"
        self.hosts: Sequence[Host] = hosts_of(addresses, self.address)
        self.running: dict[Host, subprocess.Popen[bytes]] = {}

    def start(self, host: Host, command: Sequence[str]) -> None:
        self.running[host] = subprocess.Popen(dying_with_this_process(command), stdin=subprocess.DEVNULL)

    def ended(self, within_s: float) -> Mapping[Host, HostEnd]:
        time.sleep(within_s / 10)
        codes = {host: process.poll() for host, process in self.running.items()}
        return {
            host: HostEnd(f"exit code {code}" if code else "", lost=code < 0)
            for host, code in codes.items()
            if code is not None
        }


def test_ranks_of_a_host_are_neighbours_and_the_first_is_here() -> None:
    assert hosts_of(["b", "a", "b", "c", "a"], "a") == [
        Host("a", 0, (1, 4)), Host("b", 2, (0, 2)), Host("c", 4, (3,)),
    ]  # fmt: skip
    assert [host.ranks for host in hosts_of(["b", "c", "b"], "a")] == ["ranks 0 to 1", "rank 2"]


def test_only_the_mpiexec_of_mpich_will_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(PlacementError, match="started by MPICH's mpiexec, and PATH has none: install MPICH on every"):
        find_mpiexec()
    other = tmp_path / "mpiexec"
    other.write_text("#!/bin/sh\necho 'mpiexec (OpenRTE) 4.1.4'\n")
    other.chmod(0o755)
    with pytest.raises(PlacementError, match=f"{other} is not MPICH's: install MPICH"):
        find_mpiexec()


def test_lines_of_mpiexec_are_left_out_wherever_they_are_cut() -> None:
    wanted = b"a token\n[mpi is mine]\nand\rmore"
    text = b"a token\n[mpiexec@host] its own\n[mpi is mine]\nYOUR APPLICATION TERMINATED WITH 9\nand\rmore"
    for size in range(1, len(text) + 1):
        chunks = [text[at : at + size] for at in range(0, len(text), size)]
        assert b"".join(rank_output(chunks)) == wanted


needs_mpich = pytest.mark.skipif(shutil.which("mpiexec.hydra") is None, reason="MPICH is not here")
DIES_WITH_PROXY = "from llmc.runtime.die_with_parent import signal_when_parent_dies; signal_when_parent_dies(9)\n"
RANK = "import os, sys; env = os.environ; me = int(env['PMI_RANK'])\n"


def run(placement: LocalPlacement, code: str, **options: Any) -> tuple[int, str, list[str]]:
    """Exit code, output of rank 0 and what is said of hosts. code: of each rank, which has its number as `me`."""
    written, said = bytearray(), list[str]()
    code_of_all = run_placed(
        placement, find_mpiexec(), [sys.executable, "-c", RANK + code],
        stdin=options.get("stdin", subprocess.DEVNULL), write=written.extend, say=said.append, interrupts=False,
    )  # fmt: skip
    # mpiexec may end a moment before its proxies do.
    until(lambda: all(process.poll() is not None or gone(process.pid) for process in placement.running.values()))
    return code_of_all, written.decode(), said


@needs_mpich
def test_ranks_run_where_they_are_placed(tmp_path: Path) -> None:
    placement = LocalPlacement("127.0.0.2", "127.0.0.1", "127.0.0.1")
    asked = tmp_path / "asked"
    asked.write_text("a prompt")
    with asked.open("rb") as stdin:
        # In one write: print makes several where output is not buffered, and those of ranks mix.
        line = "asked = '' if me else sys.stdin.read()\nsys.stdout.write(f\"{me} {env['MPI_LOCALNRANKS']} {asked}\\n\")"
        code, text, said = run(placement, line, stdin=stdin)
    assert (code, said) == (0, [])
    assert sorted(map(str.strip, text.splitlines())) == ["0 2 a prompt", "1 2", "2 1"]


@needs_mpich
@pytest.mark.parametrize("interrupts", [False, True])
def test_a_signal_goes_to_all_ranks(interrupts: bool) -> None:
    placement = LocalPlacement("127.0.0.1", "127.0.0.2")
    ends = "import signal, time; signal.signal(signal.SIGTERM, lambda *_: sys.exit())\n"
    ready = ends + "sys.stdout.write('up\\n'), sys.stdout.flush(); time.sleep(600)"
    seen = bytearray()

    def interrupt(data: bytes) -> None:
        seen.extend(data)
        if seen.count(b"up") == 2:
            os.kill(os.getpid(), signal.SIGINT)

    command = [sys.executable, "-c", RANK + ready]
    found = run_placed(
        placement,
        find_mpiexec(),
        command,
        stdin=subprocess.DEVNULL,
        write=interrupt,
        say=pytest.fail,
        interrupts=interrupts,
    )
    assert (found, bytes(seen)) == (130 if interrupts else 0, b"up\nup\n")  # and nothing of mpiexec's own


@needs_mpich
def test_a_host_that_is_lost_is_named_and_all_ranks_end() -> None:
    placement = LocalPlacement("127.0.0.1", "127.0.0.2")
    ranks: list[int] = []

    def kill_the_second(data: bytes) -> None:
        if b"up" not in data:
            return
        ranks.extend(descendants(os.getpid()))
        placement.running[placement.hosts[1]].kill()

    said: list[str] = []
    hang = "import time; me and sys.stdout.write('up\\n'), sys.stdout.flush(); time.sleep(600)"
    code = run_placed(
        placement, find_mpiexec(), [sys.executable, "-c", RANK + DIES_WITH_PROXY + hang],
        stdin=subprocess.DEVNULL, write=kill_the_second, say=said.append, interrupts=False,
    )  # fmt: skip
    assert code == 1
    assert said == ["rank 1 of 2, on 127.0.0.2: exit code -9"]
    assert len(ranks) > 3
    until(lambda: all(map(gone, ranks)))
