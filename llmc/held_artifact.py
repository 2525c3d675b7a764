"""A cached artifact that a process uses, and that `llmc cache gc` therefore leaves."""

from __future__ import annotations

import fcntl
import os
from contextlib import ExitStack, suppress
from pathlib import Path

_LOCKED = "graphs.bin"


def hold(artifact: Path) -> bool:
    """Holds a cached artifact until this process ends; False if it is gone. Any number of processes may hold one."""
    try:
        descriptor = os.open(artifact / _LOCKED, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    with suppress(OSError):  # a file system without locks
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    # A collection that had it first has moved it away.
    with suppress(OSError):
        if os.path.samestat(os.fstat(descriptor), (artifact / _LOCKED).stat()):
            return True
    os.close(descriptor)
    return False


def move_unless_held(artifact: Path, to: Path) -> bool:
    """Renames it in one step; False if a process holds it, or it cannot be moved."""
    try:
        with ExitStack() as stack:
            with suppress(FileNotFoundError):  # damaged: nobody holds it
                descriptor = os.open(artifact / _LOCKED, os.O_RDONLY | os.O_CLOEXEC)
                stack.callback(os.close, descriptor)
                if not _locked_alone(descriptor):
                    return False
            artifact.rename(to)
    except OSError:
        return False
    return True


def _locked_alone(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass  # a file system without locks
    return True
