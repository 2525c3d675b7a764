"""llmc serve --idle-spin-us: how long the engine's threads keep their CPUs when there is nothing to do."""

from __future__ import annotations

import time

import pytest
from conftest import TinyArtifact

from llmc.runtime.server.config import ServerConfig
from llmc.runtime.server.run import open_engine

IDLE_S = 0.4
LEAST_SPIN_S = 0.04  # a tenth: other programs may have the CPUs meanwhile


@pytest.mark.parametrize(("idle_spin_us", "spins"), [(60_000_000, True), (0, False)])
def test_threads_without_work_spin_as_long_as_they_are_told(
    tiny_artifact: TinyArtifact, idle_spin_us: int, spins: bool
) -> None:
    names = ("tiny",)
    config = ServerConfig(tiny_artifact.artifact, names, num_threads=2, idle_spin_us=idle_spin_us)
    engine = open_engine(config)  # copies weights, which is work for every thread
    try:
        time.sleep(0.1)
        before = time.process_time()
        time.sleep(IDLE_S)
        assert (time.process_time() - before >= LEAST_SPIN_S) == spins
    finally:
        engine.close()
