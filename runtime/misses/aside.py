"""Adds buckets to an artifact with a compiler in a separate process, at lowest priority."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from llmc.buckets.bucket import Bucket

# Serving takes precedence over the compiler.
_BEHIND = (sys.executable, "-P", "-m", "llmc.runtime.misses.behind")
# A separate process, because this one never loads the compiler.
_COMPILER = (sys.executable, "-P", "-m", "llmc.cli.main")


@dataclass(frozen=True)
class CompilerLimits:
    """Limits of a compiler beside serving; 0 for none. cpus: number of CPUs. cpu_s, bytes: CPU time and memory of each
    of its processes."""

    cpus: int = 0
    cpu_s: int = 0
    bytes: int = 0

    def words(self) -> list[str]:
        """As arguments of `behind`."""
        return [f"{name}={value}" for name, value in vars(self).items() if value]


class CompilerAside:
    """One compilation at a time; `end` is thread-safe."""

    def __init__(self, limits: CompilerLimits | None = None) -> None:
        self._limits = limits or CompilerLimits()
        self._lock = threading.Lock()
        self._ended = False
        self.child: subprocess.Popen[str] | None = None

    def add(self, artifact: Path, buckets: Sequence[Bucket], output: Path) -> float | None:
        """Adds buckets to `artifact`, in place or into `output`, atomically. Returns the seconds taken; None if ended
        early. Raises RuntimeError with the compiler's message."""
        words = [word for bucket in buckets for word in ("--add", str(bucket))]
        arguments = ["compile", str(artifact), *words, "-o", str(output), "--jobs", "1", "--json"]
        with self._lock:
            if self._ended:
                return None
            child = self.child = subprocess.Popen(
                [*_BEHIND, *self._limits.words(), *_COMPILER, *arguments],
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            )  # fmt: skip
        out, err = child.communicate()
        with self._lock:
            self.child = None
            if self._ended:
                return None
        if child.returncode != 0:
            raise RuntimeError(self._why(child.returncode, err))
        with contextlib.suppress(ValueError, KeyError, AttributeError):
            return float(sum(json.loads(out)["phase_seconds"].values()))
        return 0.0

    def end(self) -> None:
        """Ends a running compilation without leftovers, and prevents further ones; idempotent."""
        with self._lock:
            self._ended = True
            if self.child is not None:
                # On a busy machine, a lowest-priority process would also take long to end.
                with contextlib.suppress(AttributeError, OSError):
                    os.sched_setscheduler(self.child.pid, os.SCHED_OTHER, os.sched_param(0))
                self.child.terminate()

    def _why(self, code: int, err: str) -> str:
        if code == -signal.SIGXCPU:
            return f"the compiler took more than {self._limits.cpu_s} s of CPU time, the most it may take"
        lines = err.strip().splitlines()
        why = lines[-1].removeprefix("llmc: error: ") if lines else f"the compiler ended with exit code {code}"
        if self._limits.bytes and ("MemoryError" in err or "bad_alloc" in err or code == -signal.SIGKILL):
            why += f"; it may take {self._limits.bytes >> 20} MiB of memory"
        return why
