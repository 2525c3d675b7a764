"""bench/overlap_sums.py: the hosts that it makes, with `ip` replaced by a list of what it was asked for."""

from __future__ import annotations

import subprocess
from subprocess import CalledProcessError, CompletedProcess

import pytest

from bench.overlap_sums import joined_hosts


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
