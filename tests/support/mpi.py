"""The MPIs of this machine, of which each has an mpirun of its own."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass

import pytest


@dataclass(frozen=True)
class Mpi:
    """launcher: starts processes, followed by -n N and the command. cleans_up: pattern of its report of a
    killed rank 1, whose process is `pid`."""

    name: str
    launcher: tuple[str, ...]
    cleans_up: str


def installed() -> list[Mpi]:
    """By name. Intel MPI starts processes as MPICH does."""
    found = []
    if (hydra := shutil.which("mpiexec.hydra")) is not None:
        found.append(Mpi("mpich", (hydra,), r"PID {pid} RUNNING AT .*Killed \(signal 9\)"))
    for name in ("mpirun.openmpi", "mpirun"):
        mpirun = shutil.which(name)
        if mpirun is not None and "Open MPI" in _version(mpirun):
            launcher = (mpirun, "--oversubscribe", "--allow-run-as-root")
            found.append(Mpi("openmpi", launcher, r"process rank 1 with PID \d+ on node .* signal 9 \(Killed\)"))
            break
    return found


def _version(mpirun: str) -> str:
    return subprocess.run([mpirun, "--version"], capture_output=True, text=True, check=False).stdout


MPIS = installed()
each_mpi = pytest.mark.parametrize(
    "mpi",
    [pytest.param(mpi, id=mpi.name) for mpi in MPIS]
    or [pytest.param(None, marks=pytest.mark.skip(reason="MPI is not here"), id="none")],
)
"""Runs a test, which takes `mpi`, with each of them."""
