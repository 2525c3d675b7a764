"""Compiles buckets beside a server: into a growing second artifact, and into the first once a change is kept."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from llmc.buckets.bucket import Bucket
from llmc.machine import available_memory
from llmc.runtime.misses.aside import CompilerAside, CompilerLimits

_LEAST_BYTES = 1 << 30
_CPUS = 1


class Workshop:
    """The second artifact has the first one's graphs plus all ever added, so the engine can take them over.

    It lies beside the first one, whose weights it shares, or in the system's temporary folder. A killed process leaves
    it; the next one removes it.
    """

    def __init__(self, artifact: Path, *, memory_bytes: int = 0, cpu_s: int = 600) -> None:
        self._artifact = artifact.resolve()
        # Half of the remaining CPUs: serving and other work continue.
        allowed = memory_bytes or max(_LEAST_BYTES, available_memory() // 2)
        self._compiler = CompilerAside(CompilerLimits(cpus=_CPUS, cpu_s=cpu_s, bytes=allowed))
        self._folder: Path | None = None
        self._lock = -1
        self._ended = False

    def add(self, buckets: Sequence[Bucket]) -> tuple[Path, float] | None:
        """Compiles buckets into the second artifact. Returns (its path, seconds); None if ended early. Raises
        RuntimeError with the compiler's message, and OSError."""
        if self._ended:
            return None
        folder = self._folder or self._make()
        output = folder / "artifact"
        base = output if output.exists() else self._artifact
        seconds = self._compiler.add(base, buckets, output)
        return None if seconds is None else (output, seconds)

    def publish(self, buckets: Sequence[Bucket]) -> float | None:
        """Adds buckets to the first artifact, atomically, for the next start. Otherwise as `add`."""
        if not os.access(self._artifact.parent, os.W_OK):
            raise RuntimeError(f"{self._artifact.parent} cannot be written, so they last as long as this process")
        return self._compiler.add(self._artifact, buckets, self._artifact)

    def end(self) -> None:
        """Ends a running compilation; thread-safe."""
        self._ended = True
        self._compiler.end()

    def close(self) -> None:
        """Removes the second artifact. An engine that has opened it keeps it."""
        self.end()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            os.close(self._lock)
            self._folder = None

    def _make(self) -> Path:
        parent, prefix = self._artifact.parent, f".{self._artifact.name}.replan-"
        if os.access(parent, os.W_OK):
            for folder in parent.glob(f"{prefix}*"):
                _remove_dead(folder)
        else:
            parent, prefix = Path(tempfile.gettempdir()), "llmc-replan-"
        self._folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        self._lock = os.open(self._folder, os.O_RDONLY)
        _try_lock(self._lock)
        return self._folder


def _try_lock(descriptor: int) -> bool:
    """Whether this process holds it now; the lock ends with its holder, however that ends."""
    try:
        import fcntl
    except ImportError:  # not on Windows
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _remove_dead(folder: Path) -> None:
    """Removes what killed processes left."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            if _try_lock(descriptor):
                shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(descriptor)
