"""Wall time and peak memory of a command and of all processes that it starts."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

SAMPLES_PER_S = 20


@dataclass(frozen=True)
class Finished:
    """seconds: wall time. peak_bytes: largest sum of PSS over the process and its descendants, sampled at 20 Hz."""

    seconds: float
    peak_bytes: int


@dataclass(frozen=True)
class Memory:
    """PSS in bytes: a page that processes share is divided among them. mapped: pages of files.

    resident_files: pages of files that each process has mapped, whoever else has. Other programs change no such sum.
    """

    anonymous: int
    mapped: int
    resident_files: int

    @property
    def total(self) -> int:
        return self.anonymous + self.mapped


def _children() -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                # The name in parentheses may contain anything, so parse what follows the last parenthesis.
                parent = int(Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()[1])
            except (OSError, IndexError, ValueError):
                continue
            found.setdefault(parent, []).append(int(entry))
    return found


def tree_memory(root: int) -> Memory:
    """Memory of `root` and its descendants; nothing when it is gone."""
    children, todo = _children(), [root]
    anonymous = mapped = files = 0
    while todo:
        process = todo.pop()
        todo += children.get(process, [])
        try:
            lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
        except OSError:
            lines = []
        if not lines:
            continue  # it ended meanwhile
        sizes = {kind: int(size) << 10 for kind, size, *_ in (line.split() for line in lines[1:])}
        anonymous += sizes["Pss_Anon:"] + sizes["Pss_Shmem:"]
        mapped += sizes["Pss_File:"]
        files += sizes["Rss:"] - sizes["Anonymous:"]
    return Memory(anonymous, mapped, files)


def run(command: Sequence[str | Path]) -> Finished:
    """Runs a command with its output discarded. Raises RuntimeError with its last line of stderr when it fails."""
    begin, peak, stop = time.perf_counter(), 0, threading.Event()
    process = subprocess.Popen(list(map(str, command)), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)

    def watch() -> None:
        nonlocal peak
        while not stop.wait(1 / SAMPLES_PER_S):
            peak = max(peak, tree_memory(process.pid).total)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    errors = process.communicate()[1]
    seconds = time.perf_counter() - begin
    stop.set()
    watcher.join()
    if process.returncode:
        lines = errors.strip().splitlines() or ["no message"]
        raise RuntimeError(f"{' '.join(map(str, command))} failed with {process.returncode}: {lines[-1]}")
    return Finished(seconds, peak)
