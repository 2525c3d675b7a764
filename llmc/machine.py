"""The device and its memory: the only place in the runtime's Python that knows it is a CPU."""

from __future__ import annotations

import os
import platform
from pathlib import Path

# How the device treats padding rows: kernels get the number of valid rows.
PADDING = "skipped"
_MEMINFO = Path("/proc/meminfo")
_CPUINFO = Path("/proc/cpuinfo")
_CGROUP = Path("/proc/self/cgroup")
_CGROUP_ROOT = Path("/sys/fs/cgroup")


def available_memory() -> int:
    """Bytes that this process can still allocate without swapping: of the machine, or less under a control group's
    limit."""
    return min((_machine_memory(), *_group_memory()))


def machine_facts(num_threads: int) -> dict[str, str]:
    """Facts that determine the speed with `num_threads` engine threads, by name; they do not identify owner or
    location."""
    return {
        "arch": platform.machine(),
        "processor": _processor(),
        "cpus": str(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1),
        "threads": str(num_threads),
    }


def num_cores(root: Path = Path("/sys/devices/system/cpu")) -> int:
    """Physical cores with a CPU that this process may use; the number of CPUs if the system does not tell."""
    cpus = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    try:
        return len({(root / f"cpu{cpu}/topology/thread_siblings_list").read_text(encoding="ascii") for cpu in cpus})
    except (OSError, ValueError):
        return len(cpus)


def _machine_memory() -> int:
    try:
        for line in _MEMINFO.read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def control_groups(of_process: Path, root: Path) -> list[Path]:
    """Folders of the control groups (version 2) of a process, its own first, then upwards, without the root.

    of_process: /proc/self/cgroup. root: mount point of the hierarchy.
    """
    try:
        lines = of_process.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    path = next((line[3:] for line in lines if line.startswith("0::")), "")
    group = root / path.lstrip("/")
    return [folder for folder in (group, *group.parents) if root in folder.parents]


def _group_memory() -> list[int]:
    """Bytes left under the limit of each control group of this process."""
    return [left for group in control_groups(_CGROUP, _CGROUP_ROOT) for left in _left_in(group)]


def _left_in(group: Path) -> list[int]:
    try:
        limit = (group / "memory.max").read_text(encoding="ascii").strip()
        if limit == "max":
            return []
        used = int((group / "memory.current").read_text(encoding="ascii"))
        # The page cache is reclaimable.
        stat = dict(line.split() for line in (group / "memory.stat").read_text(encoding="ascii").splitlines())
        return [max(0, int(limit) - used + int(stat.get("inactive_file", 0)) + int(stat.get("active_file", 0)))]
    except (OSError, ValueError):
        return []


def _processor() -> str:
    try:
        for line in _CPUINFO.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return " ".join(line.partition(":")[2].split())
    except OSError:
        pass
    return platform.processor() or "unknown"
