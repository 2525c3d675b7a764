"""Rank of this process under MPI, if mpirun started it."""

from __future__ import annotations

import os
from dataclasses import dataclass

# Environment variables of each MPI: rank, number of ranks, and local rank on the host.
_LAUNCHERS = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)
# Libraries: Open MPI's 4 and 5; MPICH's and Intel's; Debian's name of MPICH's.
_LIBRARIES = (("libmpi.so.40", "libmpi.so"), ("libmpi.so.12", "libmpich.so.12", "libmpi.so"))


@dataclass(frozen=True)
class MpiRank:
    """Rank of this process according to mpirun. library: of its MPI, for dlopen. local_rank, local_ranks: on this
    host."""

    rank: int
    ranks: int
    local_rank: int
    local_ranks: int
    library: str


def mpi_rank() -> MpiRank | None:
    """This process among those that mpirun started; None if mpirun started only one or was not used."""
    for names, libraries in zip(_LAUNCHERS, _LIBRARIES, strict=True):
        rank, ranks, local_rank, local_ranks = (os.environ.get(name, "") for name in names)
        if not rank.isdecimal() or not ranks.isdecimal() or int(ranks) < 2:
            continue
        local = (local_rank, local_ranks)
        if not all(part.isdecimal() for part in local):
            local = ("0", "1")
        return MpiRank(int(rank), int(ranks), int(local[0]), int(local[1]), _library(libraries))
    return None


def _library(names: tuple[str, ...]) -> str:
    """The path in $LLMC_MPI_LIBRARY, else the first name that the system's linker finds."""
    import ctypes

    chosen = os.environ.get("LLMC_MPI_LIBRARY")
    if chosen:
        return chosen
    for name in names:
        try:
            ctypes.CDLL(name, mode=ctypes.RTLD_GLOBAL)
        except OSError:
            continue
        return name
    return names[0]
