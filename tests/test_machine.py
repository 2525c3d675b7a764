"""Memory that is available, by the machine and its control groups, and what a machine's fingerprint is made of."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from llmc import machine as device
from llmc.runtime.binding import Artifact
from llmc.runtime.warm_up.budget import BudgetOptions, plan_budget, size_order

from support.artifacts import TinyArtifact

GIB = 1 << 30


MOUNTS = {
    2: ("sys/fs/cgroup", "/sys/fs/cgroup rw - cgroup2 cgroup2 rw"),
    1: ("sys/fs/cgroup/memory", "/sys/fs/cgroup/memory rw - cgroup cgroup rw,memory"),
}
"""By version of control groups: the folder of memory limits, and the end of its line in mountinfo."""
FILES = {2: ("memory.max", "memory.current", ""), 1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")}
NO_LIMIT = {2: "max", 1: "9223372036854771712"}
versions = pytest.mark.parametrize("version", MOUNTS)


def machine(root: Path, version: int, group: str = "/a/b", mounted: str = "/") -> Path:
    """A machine of 8 GiB whose process is in a group; `mounted` of the hierarchy is what it sees. Gives the folder of
    the mount point."""
    (root / "proc" / "self").mkdir(parents=True)
    (root / "proc" / "meminfo").write_text(f"MemTotal: {16 << 20} kB\nMemAvailable: {8 << 20} kB\n")
    lines = {2: f"1:cpu:/x\n0::{group}\n", 1: f"4:cpu,memory:{group}\n0::/z\n"}
    (root / "proc" / "self" / "cgroup").write_text(lines[version])
    folder, mount = MOUNTS[version]
    (root / "proc" / "self" / "mountinfo").write_text(f"22 1 0:1 / / rw - ext4 a rw\n30 22 0:26 {mounted} {mount}\n")
    return root / folder


def limit(group: Path, version: int, maximum: int | str, current: int, **cached: int) -> None:
    most, used, prefix = FILES[version]
    group.mkdir(parents=True, exist_ok=True)
    (group / most).write_text(f"{maximum}\n")
    (group / used).write_text(f"{current}\n")
    stat = {"anon": 1, **{f"{prefix}{name}": size for name, size in cached.items()}}
    (group / "memory.stat").write_text("".join(f"{name} {size}\n" for name, size in stat.items()))


@versions
def test_without_limits_it_is_the_machines(version: int, tmp_path: Path) -> None:
    groups = machine(tmp_path, version)
    assert device.available_memory(tmp_path) == 8 * GIB
    limit(groups / "a", version, NO_LIMIT[version], 3)
    assert device.available_memory(tmp_path) == 8 * GIB


@versions
def test_the_tightest_group_on_the_path_counts(version: int, tmp_path: Path) -> None:
    groups = machine(tmp_path, version)
    limit(groups / "a", version, 6 * GIB, GIB)
    assert device.available_memory(tmp_path) == 5 * GIB
    limit(groups / "a" / "b", version, 2 * GIB, GIB)
    assert device.available_memory(tmp_path) == GIB
    limit(groups / "a" / "b", version, GIB, 2 * GIB)
    assert device.available_memory(tmp_path) == 0


@versions
@pytest.mark.parametrize(("group", "mounted"), [("/", "/"), ("/docker/1", "/docker/1"), ("/../1", "/"), ("/x", "/y")])
def test_a_containers_own_group_is_at_the_mount_point(version: int, group: str, mounted: str, tmp_path: Path) -> None:
    limit(machine(tmp_path, version, group, mounted), version, 2 * GIB, GIB)
    assert device.available_memory(tmp_path) == GIB


@versions
def test_a_budget_stays_within_the_limit(version: int, tmp_path: Path, tiny_artifact: TinyArtifact) -> None:
    """The KV pool that --memory-utilization sizes."""
    limit(machine(tmp_path, version, "/"), version, GIB, GIB // 2)
    with Artifact(tiny_artifact.artifact) as artifact:
        info, graphs = artifact.info, artifact.graphs()
    available = device.available_memory(tmp_path)
    budget = plan_budget(info, graphs, size_order(graphs), available, BudgetOptions(utilization=1.0))
    assert budget.kv_bytes <= GIB // 2
    assert budget.kv_bytes + budget.graph_bytes > 0.9 * available


@versions
def test_the_page_cache_of_a_group_gives_way(version: int, tmp_path: Path) -> None:
    groups = machine(tmp_path, version)
    limit(groups / "a", version, 4 * GIB, 3 * GIB, active_file=GIB, inactive_file=GIB)
    assert device.available_memory(tmp_path) == 3 * GIB
    # Counted at different moments.
    limit(groups / "a", version, GIB, GIB // 2, active_file=GIB)
    assert device.available_memory(tmp_path) == GIB


@versions
@pytest.mark.parametrize("text", ["", "much\n"])
def test_files_that_say_nothing_limit_nothing(version: int, text: str, tmp_path: Path) -> None:
    groups = machine(tmp_path, version)
    limit(groups / "a", version, 1, 1)
    (groups / "a" / FILES[version][1]).write_text(text)
    assert device.available_memory(tmp_path) == 8 * GIB


def test_without_any_of_them_it_is_what_is_built_in(tmp_path: Path) -> None:
    assert device.available_memory(tmp_path) > 0
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc" / "meminfo").write_text("MemAvailable: much\n")
    assert device.available_memory(tmp_path) > 0
    assert device.available_memory() > 0


def test_a_machine_is_known_by_what_makes_it_fast() -> None:
    facts = device.machine_facts(3)
    assert facts["threads"] == "3"
    assert set(facts) == {"arch", "processor", "cpus", "threads"}
    assert all(isinstance(value, str) and value for value in facts.values())
    assert socket.gethostname() not in facts.values()
    assert device.machine_facts(2) != facts
