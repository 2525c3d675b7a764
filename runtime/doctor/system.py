"""Linux's facts on CPUs and memory, in /proc and /sys below `root`; missing files are skipped."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path

from llmc.machine import available_memory, control_groups
from llmc.runtime.doctor.check import Check
from llmc.units import format_bytes

ROOT = Path("/")
_FILES = 4096
"""Open files that a server needs with its default connection limit."""


def system_checks(root: Path = ROOT) -> Iterator[Check]:
    """CPUs, memory and limits of this process, in reading order."""
    cpus = os.sched_getaffinity(0)
    yield from _quota(root, len(cpus))
    yield from _load(root, len(cpus))
    yield from _governor(root, cpus)
    yield from _huge_pages(root)
    yield from _nodes(root)
    yield Check("memory available", format_bytes(available_memory(root)))
    yield _open_files()


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return None


def _quota(root: Path, cpus: int) -> Iterator[Check]:
    """The CPU time that a control group allows, if less than the CPUs."""
    least = float(cpus)
    for group in control_groups("cpu", root):
        quota, _, period = (_text(group / "cpu.max") or "max").partition(" ")
        if quota == "max":
            quota, period = (_text(group / f"cpu.cfs_{name}_us") or "" for name in ("quota", "period"))
        if quota.isdigit() and period.isdigit() and int(period):
            least = min(least, int(quota) / int(period))
    if least < cpus:
        advice = (
            f"a container or service has {least:g} of {cpus} CPUs: raise its limit, or pass --threads {int(least) or 1}"
        )
        yield Check("CPU quota", f"{least:g} CPUs", advice)


def _load(root: Path, cpus: int) -> Iterator[Check]:
    words = (_text(root / "proc/loadavg") or "").split()
    if not words:
        return
    load = float(words[0])
    advice = None
    if load > 0.5 * cpus:
        advice = "other programs use the CPUs: stop them, or keep them off some CPUs and give those to llmc"
    yield Check("load", f"{load:g} of {cpus} CPUs, last minute", advice)


def _governor(root: Path, cpus: set[int]) -> Iterator[Check]:
    folder = root / "sys/devices/system/cpu"
    found = {_text(folder / f"cpu{cpu}/cpufreq/scaling_governor") for cpu in cpus} - {None}
    if found:
        names = ", ".join(sorted(name for name in found if name is not None))
        advice = None
        if found != {"performance"}:
            advice = "cpupower frequency-set -g performance keeps clocks up between requests"
        yield Check("frequency governor", names, advice)


def _huge_pages(root: Path) -> Iterator[Check]:
    text = _text(root / "sys/kernel/mm/transparent_hugepage/enabled")
    if text is None:
        return
    chosen = text.partition("[")[2].partition("]")[0]
    advice = None
    if chosen == "never":
        advice = "weights are read faster from huge pages: echo madvise > /sys/kernel/mm/transparent_hugepage/enabled"
    yield Check("huge pages", chosen or text, advice)


def _nodes(root: Path) -> Iterator[Check]:
    folder = root / "sys/devices/system/node"
    nodes = sorted(folder.glob("node[0-9]*")) if folder.is_dir() else []
    if nodes:
        advice = None
        if len(nodes) > 1:
            advice = "for more requests rather than each sooner, run one server a node: numactl -N 0 -m 0 llmc serve …"
        yield Check("memory nodes", str(len(nodes)), advice)


def _open_files() -> Check:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    advice = None
    if soft != unlimited and soft < _FILES:
        advice = f"many connections need more: ulimit -n {_FILES}"
        if hard != unlimited and hard < _FILES:
            advice += f" (the hard limit is {hard}, which root raises)"
    return Check("open files", "no limit" if soft == unlimited else str(soft), advice)
