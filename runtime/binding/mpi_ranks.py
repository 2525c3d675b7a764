"""Ranks started by mpirun: the part of each besides rank 0's engine."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from ctypes import c_void_p

from llmc.mpi_loader import MpiRank
from llmc.runtime.binding.handle import Handle, LlmcError, call
from llmc.runtime.binding.ranks import own_cpus, parse_ranks, shares_of

_START_S = 60.0


class MpiRanks:
    """The other ranks, as seen by rank 0's engine."""

    def __init__(self, device: Handle) -> None:
        """device: rank 0's, which stays open with this object."""
        self._device = device

    def check(self) -> None:
        """Raises LlmcError once a rank has failed."""
        call("llmc_device_check", self._device.pointer)


@contextlib.contextmanager
def cpus_of_rank(mpi: MpiRank, num_ranks: int, wanted: str | None) -> Iterator[None]:
    """Binds the calling thread, and threads it starts, to this rank's CPUs. Raises RanksError.

    wanted: for all ranks, as in `parse_ranks`. Without CPUs there, mpirun's binding counts; if every rank has all CPUs,
    the ranks of this host divide them.
    """
    before = os.sched_getaffinity(0)
    cpus = None if wanted is None else parse_ranks(wanted, num_ranks, own=mpi.rank)
    if cpus is not None:
        os.sched_setaffinity(0, cpus[mpi.rank])
    elif mpi.local_ranks > 1 and before == os.sched_getaffinity(os.getppid()):
        os.sched_setaffinity(0, shares_of(own_cpus(), mpi.local_ranks)[mpi.local_rank])
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@contextlib.contextmanager
def all_must_start(mpi: MpiRank) -> Iterator[None]:
    """Ends this process if the other ranks do not start MPI in time.

    MPI waits without limit for a process that ended before, and nothing can interrupt it.
    """

    def give_up() -> None:
        why = f"the other ranks have not started within {_START_S:g} s: one may have ended, with a message above"
        print(f"llmc: error: rank {mpi.rank}: {why}; start them again", file=sys.stderr, flush=True)
        os._exit(1)

    timer = threading.Timer(_START_S, give_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def follow_rank(mpi: MpiRank, artifact: c_void_p, open_device: Callable[[], Handle]) -> int:
    """Does this rank's part until rank 0 ends; returns 1, with a message on stderr, if a rank has failed."""
    if threading.current_thread() is threading.main_thread():
        # Rank 0 drains on these signals, and needs this rank until then.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        with open_device() as device:
            # mpirun reports a dead process by its number.
            print(
                f"llmc: rank {mpi.rank} of {mpi.ranks} is process {os.getpid()} on {socket.gethostname()}",
                file=sys.stderr,
            )
            call("llmc_device_follow", device.pointer, artifact)
    except LlmcError as error:
        print(f"llmc: rank {mpi.rank}: {error}", file=sys.stderr)
        return 1
    return 0
