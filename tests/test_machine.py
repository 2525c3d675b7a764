"""Memory that is available, by the machine and its control groups, and what a machine's fingerprint is made of."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from llmc import machine as device

GIB = 1 << 30


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine of 8 GiB whose process is in the group /a/b."""
    (tmp_path / "meminfo").write_text(f"MemTotal: {16 << 20} kB\nMemAvailable: {8 << 20} kB\n")
    (tmp_path / "self").write_text("1:cpu:/x\n0::/a/b\n")
    (tmp_path / "groups" / "a" / "b").mkdir(parents=True)
    monkeypatch.setattr(device, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(device, "_CGROUP", tmp_path / "self")
    monkeypatch.setattr(device, "_CGROUP_ROOT", tmp_path / "groups")
    return tmp_path / "groups"


def limit(group: Path, maximum: str, current: int, stat: str = "") -> None:
    (group / "memory.max").write_text(maximum + "\n")
    (group / "memory.current").write_text(f"{current}\n")
    (group / "memory.stat").write_text(stat)


def test_without_limits_it_is_the_machines(machine: Path) -> None:
    assert device.available_memory() == 8 * GIB
    limit(machine / "a", "max", 3)
    assert device.available_memory() == 8 * GIB


def test_the_tightest_group_on_the_path_counts(machine: Path) -> None:
    limit(machine / "a", str(6 * GIB), GIB)
    assert device.available_memory() == 5 * GIB
    limit(machine / "a" / "b", str(2 * GIB), GIB)
    assert device.available_memory() == GIB
    limit(machine / "a" / "b", str(GIB), 2 * GIB)
    assert device.available_memory() == 0


def test_the_page_cache_of_a_group_gives_way(machine: Path) -> None:
    limit(machine / "a", str(4 * GIB), 3 * GIB, f"anon {GIB}\nactive_file {GIB}\ninactive_file {GIB}\n")
    assert device.available_memory() == 3 * GIB


@pytest.mark.parametrize("text", ["", "much\n"])
def test_files_that_say_nothing_limit_nothing(machine: Path, text: str) -> None:
    limit(machine / "a", "1", 1)
    (machine / "a" / "memory.current").write_text(text)
    assert device.available_memory() == 8 * GIB


def test_without_any_of_them_it_is_what_is_built_in(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_MEMINFO", "_CGROUP"):
        monkeypatch.setattr(device, name, machine / "nowhere")
    assert device.available_memory() > 0


def test_a_machine_is_known_by_what_makes_it_fast() -> None:
    facts = device.machine_facts(3)
    assert facts["threads"] == "3"
    assert set(facts) == {"arch", "processor", "cpus", "threads"}
    assert all(isinstance(value, str) and value for value in facts.values())
    assert socket.gethostname() not in facts.values()
    assert device.machine_facts(2) != facts
