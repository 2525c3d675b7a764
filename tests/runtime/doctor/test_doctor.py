"""What `llmc doctor` says of machines that are made up, of this one, and of what is installed."""

from __future__ import annotations

import json
import os
import resource
import socket
from pathlib import Path

import pytest

from llmc.cli.main import main
from llmc.runtime.doctor import installed
from llmc.runtime.doctor.check import Check
from llmc.runtime.doctor.installed import installed_checks
from llmc.runtime.doctor.system import system_checks

CPUS = len(os.sched_getaffinity(0))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A machine without a fault, whose process is in the group /a/b."""
    put(tmp_path, "proc/loadavg", f"{CPUS * 0.1:.2f} 0.2 0.3 1/200 4242")
    put(tmp_path, "proc/self/cgroup", "1:cpu:/x\n0::/a/b")
    version_2 = "30 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw"
    put(tmp_path, "proc/self/mountinfo", f"{version_2}\n33 31 0:30 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu")
    put(tmp_path, "sys/fs/cgroup/cpu/x/cpu.cfs_quota_us", "-1")
    put(tmp_path, "sys/fs/cgroup/cpu/x/cpu.cfs_period_us", "100000")
    put(tmp_path, "sys/fs/cgroup/a/cpu.max", "max 100000")
    put(tmp_path, "sys/fs/cgroup/a/b/cpu.max", "max 100000")
    put(tmp_path, "sys/kernel/mm/transparent_hugepage/enabled", "always [madvise] never")
    for cpu in os.sched_getaffinity(0):
        put(tmp_path, f"sys/devices/system/cpu/cpu{cpu}/cpufreq/scaling_governor", "performance")
    put(tmp_path, "sys/devices/system/node/node0/cpulist", "0-1")
    return tmp_path


def put(root: Path, name: str, text: str) -> None:
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text(f"{text}\n")


def found(root: Path) -> dict[str, Check]:
    return {check.name: check for check in system_checks(root)}


def test_a_machine_without_a_fault_needs_no_advice(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1 << 16, 1 << 20))
    checks = found(root)
    assert {check.advice for check in checks.values()} == {None}
    assert "CPU quota" not in checks
    assert checks["huge pages"].value == "madvise"
    assert checks["memory nodes"].value == "1"
    assert checks["open files"].value == "65536"


@pytest.mark.parametrize(
    ("name", "text", "check", "said"),
    [
        ("proc/loadavg", f"{CPUS * 0.6:.2f} 0 0 1/200 4242", "load", "other programs"),
        ("sys/fs/cgroup/a/b/cpu.max", "50000 100000", "CPU quota", "--threads 1"),
        ("sys/fs/cgroup/a/cpu.max", f"{CPUS * 50000} 100000", "CPU quota", "raise its limit"),
        ("sys/fs/cgroup/cpu.max", "50000 100000", "CPU quota", "raise its limit"),
        ("sys/fs/cgroup/cpu/x/cpu.cfs_quota_us", "50000", "CPU quota", "--threads 1"),
        ("sys/kernel/mm/transparent_hugepage/enabled", "always madvise [never]", "huge pages", "echo madvise"),
        ("sys/devices/system/node/node1/cpulist", "2-3", "memory nodes", "numactl"),
    ],
)
def test_each_fault_has_its_advice(root: Path, name: str, text: str, check: str, said: str) -> None:
    put(root, name, text)
    advice = found(root)[check].advice
    assert advice is not None
    assert said in advice


def test_one_cpu_that_saves_power_is_told(root: Path) -> None:
    cpu = min(os.sched_getaffinity(0))
    put(root, f"sys/devices/system/cpu/cpu{cpu}/cpufreq/scaling_governor", "powersave")
    assert "performance" in str(found(root)["frequency governor"].advice)


def test_few_open_files_are_told_with_their_hard_limit(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 512))
    advice = str(found(root)["open files"].advice)
    assert "ulimit -n" in advice
    assert "512" in advice


def test_a_system_that_says_nothing_is_no_error(tmp_path: Path) -> None:
    assert set(found(tmp_path)) == {"memory available", "open files"}


def test_a_port_that_is_taken_is_told() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        checks = {check.name: check for check in installed_checks(port)}
    assert checks["port"].value == f"{port} is taken"
    assert "--port" in str(checks["port"].advice)


def test_what_is_missing_of_the_compiler_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installed, "COMPILER", {"Nothing": "llmc-no-such-distribution"})
    check = next(check for check in installed_checks(1) if check.name == "compiler")
    assert check.value == "not installed"
    assert "pip install" in str(check.advice)


def test_the_command_says_the_same_to_people_and_machines(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--no-measure", "--json"]) == 0
    checks = json.loads(capsys.readouterr().out)
    assert main(["doctor", "--no-measure"]) == 0
    text = capsys.readouterr().out
    names = [check["name"] for check in checks]
    assert {"processor", "instructions", "memory available", "llmc", "compiler", "compile cache", "port"} <= set(names)
    lines = text.splitlines()
    assert [line[:20].rstrip() for line in lines[: len(names)]] == names
    assert any(line in ("Nothing to change.", "To change:") for line in lines)


def test_limits_are_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    values = {check["name"]: check["value"] for check in json.loads(capsys.readouterr().out)}
    assert float(values["memory read"].removesuffix(" GB/s").replace(",", "")) > 0
    assert float(values["f32 peak"].removesuffix(" Gop/s").replace(",", "")) > 0
