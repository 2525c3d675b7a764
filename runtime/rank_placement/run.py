"""Runs a command as the ranks of an artifact, on hosts that a placement has found."""

from __future__ import annotations

import contextlib
import math
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType
from typing import IO, Protocol

from llmc.runtime.rank_placement.hosts import Host, HostEnd
from llmc.runtime.rank_placement.mpiexec import Mpiexec

_LOOK_S = 0.1
_ALL_END_S = 10.0
"""Time for all ranks to end after the first host's."""
_REASONS_S = 3.0
"""Time for all hosts to be known to have ended, after mpiexec."""
_INTERRUPTED = 130


class Placement(Protocol):
    """Hosts with room for ranks. address: of this machine, as the hosts reach it."""

    address: str
    hosts: Sequence[Host]

    def start(self, host: Host, command: Sequence[str]) -> None:
        """Runs a command on a host, which gets SIGKILL with the placement. Raises PlacementError."""

    def ended(self, within_s: float) -> Mapping[Host, HostEnd]:
        """All hosts whose command has ended; waits for a further one."""


def run_placed(
    placement: Placement,
    program: str,
    command: Sequence[str],
    *,
    stdin: IO[bytes] | int | None,
    write: Callable[[bytes], object],
    say: Callable[[str], None],
    interrupts: bool,
) -> int:
    """Runs `command` as each rank, in mpiexec's environment, to its end; returns the exit code.

    program: MPICH's mpiexec. stdin: of rank 0. write: gets what the ranks write to stdout. say: gets sentences about
    hosts that fail. On SIGINT and SIGTERM all ranks get a SIGTERM. interrupts: after a SIGINT their work is not done,
    as the exit code tells. Raises PlacementError.
    """
    num_ranks = sum(len(host.bundles) for host in placement.hosts)
    mpiexec = Mpiexec(program, placement.address, placement.hosts, command, stdin=stdin)
    try:
        for host, proxy in zip(placement.hosts, mpiexec.proxies(), strict=True):
            placement.start(host, proxy)
        output = mpiexec.relay(write)
        with _signals_to(mpiexec) as got:
            code = _until_end(placement, mpiexec, num_ranks, say)
        output.join()
    finally:
        mpiexec.close()
    if interrupts and signal.SIGINT in got:  # after a signal, mpiexec's code does not tell
        return _INTERRUPTED
    return 1 if code else 0


def _until_end(placement: Placement, mpiexec: Mpiexec, num_ranks: int, say: Callable[[str], None]) -> int:
    """Waits for all ranks to end, and reports hosts that failed; returns mpiexec's exit code."""
    deadline = math.inf
    while (code := mpiexec.poll()) is None and time.monotonic() < deadline:
        if ends := placement.ended(_LOOK_S):
            if len(ends) == len(placement.hosts):  # then ended() does not wait
                mpiexec.wait(_LOOK_S)
            deadline = min(deadline, time.monotonic() + _ALL_END_S)
    if code is None:
        mpiexec.close()
        say(f"ranks have not ended within {_ALL_END_S:g} s of the first one, and are killed")
    if code == 0:
        return 0
    # mpiexec notices a lost host before Ray does.
    deadline = time.monotonic() + _REASONS_S
    while len(ends := placement.ended(_LOOK_S)) < len(placement.hosts) and time.monotonic() < deadline:
        pass
    failed = {host: end for host, end in ends.items() if end.why}
    for host, end in failed.items():
        # The others have failed because of those that are lost.
        if end.lost or not any(one.lost for one in failed.values()):
            say(f"{host.ranks} of {num_ranks}, on {host.address}: {end.why}")
    return 1 if code is None else code


@contextlib.contextmanager
def _signals_to(mpiexec: Mpiexec) -> Iterator[set[int]]:
    """Sends all ranks a SIGTERM for each SIGINT and SIGTERM during the block; yields those that came."""
    got: set[int] = set()

    def pass_on(signum: int, _frame: FrameType | None) -> None:
        got.add(signum)
        # mpiexec passes SIGINT on, too, but does not wait for the ranks to end.
        mpiexec.send(signal.SIGTERM)

    before = {signum: signal.signal(signum, pass_on) for signum in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield got
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
