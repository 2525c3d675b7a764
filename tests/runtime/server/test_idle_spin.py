"""llmc serve --idle-spin-us: how long the engine's threads keep their CPUs when there is nothing to do."""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path

import pytest

from llmc.runtime.server.config import ServerConfig
from llmc.runtime.server.run import open_engine

from support.artifacts import TinyArtifact

TASKS = Path("/proc/self/task")
WATCHED_S = 0.1  # a hundred times the default
PATIENCE_S = 30


def name(task: Path) -> str:
    try:
        return (task / "comm").read_text().strip()
    except (FileNotFoundError, ProcessLookupError):  # a thread of another test ended after its folder was listed
        return ""


def workers() -> set[Path]:
    return {task for task in TASKS.iterdir() if re.fullmatch(r"llmc-\d+", name(task))}


def sleeps(task: Path) -> bool:
    """A thread that spins is runnable, whether it has a CPU or waits for one."""
    return (task / "stat").read_text().rpartition(")")[2].split()[0] == "S"


@pytest.mark.skipif(sys.platform != "linux", reason="states of threads are read from /proc")
@pytest.mark.parametrize(("idle_spin_us", "spins"), [(60_000_000, True), (0, False)])
def test_threads_without_work_spin_as_long_as_they_are_told(
    tiny_artifact: TinyArtifact, idle_spin_us: int, spins: bool
) -> None:
    others = workers()
    config = ServerConfig(tiny_artifact.artifact, ("tiny",), num_threads=2, idle_spin_us=idle_spin_us)
    engine = open_engine(config)  # copies weights, which is work for every thread
    try:
        (worker,) = workers() - others
        end = time.monotonic() + (WATCHED_S if spins else PATIENCE_S)
        while not (slept := sleeps(worker)) and time.monotonic() < end:
            pass
        assert slept != spins
    finally:
        engine.close()
