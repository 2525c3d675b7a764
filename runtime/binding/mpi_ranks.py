"""Ranks that mpirun has started: what each does beside the engine of rank 0."""

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
from llmc.runtime.binding.ranks import cores, parse_rank_cpus, shares_of


class MpiRanks:
    """The other ranks, as rank 0's engine sees them."""

    def __init__(self, device: Handle) -> None:
        """device: rank 0's, which stays open with this."""
        self._device = device

    def check(self) -> None:
        """Raises LlmcError once a rank has failed."""
        call("llmc_device_check", self._device.pointer)


@contextlib.contextmanager
def cpus_of_rank(mpi: MpiRank, num_ranks: int, cpus: str | None) -> Iterator[None]:
    """The calling thread, and those that it starts, keep to the CPUs of this rank. Raises ValueError.

    cpus: as `parse_rank_cpus` takes them, for all ranks. None: those that mpirun gave it; where each has all, the ranks
    of this host share them out.
    """
    before = os.sched_getaffinity(0)
    if cpus is not None:
        os.sched_setaffinity(0, parse_rank_cpus(cpus, num_ranks, own=mpi.rank)[mpi.rank])
    elif mpi.local_ranks > 1 and before == os.sched_getaffinity(os.getppid()):
        os.sched_setaffinity(0, shares_of(cores(), mpi.local_ranks)[mpi.local_rank])
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def follow_rank(mpi: MpiRank, artifact: c_void_p, open_device: Callable[[], Handle]) -> int:
    """Does this rank's part until rank 0 ends; 1 when a rank has failed, which is said on stderr."""
    if threading.current_thread() is threading.main_thread():
        # Rank 0 drains on these, and needs this rank until it has.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        with open_device() as device:
            # mpirun names a process that has died by its number.
            print(
                f"llmc: rank {mpi.rank} of {mpi.ranks} is process {os.getpid()} on {socket.gethostname()}",
                file=sys.stderr,
            )
            call("llmc_device_follow", device.pointer, artifact)
    except LlmcError as error:
        print(f"llmc: rank {mpi.rank}: {error}", file=sys.stderr)
        return 1
    return 0
