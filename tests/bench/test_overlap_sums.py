"""bench/overlap_sums.py: the hosts that it makes, with `ip` replaced by a list of what it was asked for."""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from subprocess import CalledProcessError, CompletedProcess

import pytest

from bench import overlap_sums
from bench.limited import HungError
from bench.overlap_sums import joined_hosts, measure


@pytest.mark.parametrize("there", [[], ["llmc-bench-a"], ["llmc-bench-b"]], ids=["none", "first", "second"])
def test_hosts_of_another_run_stay(there: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """there: before a run, which then fails."""
    hosts = set(there)

    def run(command: list[str], **_: object) -> CompletedProcess[str]:
        if command[1:3] == ["netns", "add"]:
            if command[3] in hosts:
                raise CalledProcessError(1, command)
            hosts.add(command[3])
        if command[1:3] == ["netns", "del"]:
            hosts.remove(command[3])
        return CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", run)
    try:
        with joined_hosts(1.0):
            assert hosts == {"llmc-bench-a", "llmc-bench-b"}
    except CalledProcessError:
        assert there
    assert hosts == set(there)


def test_a_run_that_hangs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: "mpiexec.hydra")
    monkeypatch.setattr(overlap_sums, "joined_hosts", lambda _: nullcontext())
    hangs = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]
    monkeypatch.setattr(overlap_sums, "mpi_command", lambda *_: hangs)
    monkeypatch.setattr(overlap_sums, "_RUN_S", 0.1)
    given = argparse.Namespace(artifact=Path("a"), bucket="prefill:1x16", replays=1, rounds=3, gbps=1.0)
    with pytest.raises(HungError, match=r"^round 1 of 3 with --overlap-sums off has not ended within 0\.1 seconds$"):
        measure(given)
