"""The device and its memory: the only place in the runtime's Python that knows it is a CPU."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterator
from pathlib import Path

# How the device treats padding rows: kernels get the number of valid rows.
PADDING = "skipped"
_ROOT = Path("/")
# Of a control group: its limit, what it uses, and the lines of memory.stat that count the page cache, by version.
_MEMORY_FILES = (
    ("memory.max", "memory.current", ("inactive_file", "active_file")),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file")),
)
# mountinfo writes space, tab, newline and backslash as \ooo.
_OCTAL = re.compile(r"\\([0-7]{3})")


def available_memory(root: Path = _ROOT) -> int:
    """Bytes that this process can still allocate without swapping: of the machine, or less under a control group's
    limit. The page cache counts as free. Files of /proc and /sys are read below `root`."""
    return min((_machine_memory(root), *_group_memory(root)))


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


def control_groups(controller: str, root: Path = _ROOT) -> list[Path]:
    """Folders that may have limits of this process, as core/cgroup.h finds them, too. For each mounted hierarchy with
    that controller ("cpu", "memory"), of either version: its group and all groups above, to the mount point. In a
    container that is the container's own group."""
    unified, of_controller = "", ""
    for line in _lines(root / "proc/self/cgroup"):
        # Version 1: "4:cpu,cpuacct:/path", version 2: "0::/path".
        _, _, rest = line.partition(":")
        controllers, colon, path = rest.partition(":")
        if colon and not controllers:
            unified = path
        elif controller in controllers.split(","):
            of_controller = path
    found: list[Path] = []
    for line in _lines(root / "proc/self/mountinfo"):
        # id parent major:minor root point options [optional fields] - type source super-options
        left, _, right = line.partition(" - ")
        mount, kind = left.split(" "), right.split(" ")
        if len(mount) < 5 or len(kind) < 3:
            continue
        path = unified if kind[0] == "cgroup2" else ""
        if kind[0] == "cgroup" and controller in kind[2].split(","):
            path = of_controller
        if path:
            point = root / _plain(mount[4]).lstrip("/")
            below = Path(_below(path, _plain(mount[3])))
            found += [point / folder for folder in (below, *below.parents)]
    return found


def _plain(field: str) -> str:
    return _OCTAL.sub(lambda code: chr(int(code[1], 8)), field)


def _below(path: str, mounted: str) -> str:
    """A group's path relative to the mounted folder. A group outside, as seen in a namespace, counts as the folder
    itself."""
    rest = path.removeprefix(mounted.rstrip("/"))
    inside = path.startswith(mounted.rstrip("/")) and rest.startswith("/") and "/.." not in path
    return rest.strip("/") if inside else ""


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError:
        return []


def _machine_memory(root: Path) -> int:
    for line in _lines(root / "proc/meminfo"):
        name, _, amount = line.partition(":")
        if name == "MemAvailable" and amount.split()[:1] and amount.split()[0].isdecimal():
            return int(amount.split()[0]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _group_memory(root: Path) -> Iterator[int]:
    """Bytes left under each limit of this process's control groups."""
    for group in control_groups("memory", root):
        for limit_file, used_file, cached in _MEMORY_FILES:
            try:
                limit = (group / limit_file).read_text(encoding="ascii").strip()
                if limit == "max":
                    continue
                used = int((group / used_file).read_text(encoding="ascii"))
                stat = dict(line.split() for line in _lines(group / "memory.stat") if line)
                kept = max(0, used - sum(int(stat.get(name, 0)) for name in cached))
                yield max(0, int(limit) - kept)
            except (OSError, ValueError):
                continue


def _processor() -> str:
    for line in _lines(_ROOT / "proc/cpuinfo"):
        if line.startswith("model name"):
            return " ".join(line.partition(":")[2].split())
    return platform.processor() or "unknown"
