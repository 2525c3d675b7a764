"""A cached artifact that a process uses, and that `llmc cache gc` therefore leaves."""

from __future__ import annotations

import errno
import os
import threading
from contextlib import ExitStack, suppress
from pathlib import Path

_LOCKED = "graphs.bin"
_held: dict[Path, int] = {}  # descriptors with a lock, by resolved path
_mutex = threading.Lock()


def hold(artifact: Path) -> bool:
    """Holds a cached artifact until this process ends; False if it is gone. Any number of processes may hold one."""
    path = artifact.resolve()
    with _mutex:
        descriptor = _locked(path)
        if descriptor is None:
            return False
        # Of the same artifact, or of the one that was here before.
        former = _held.pop(path, None)
        if former is not None:
            os.close(former)
        _held[path] = descriptor
    return True


def hold_again(artifact: Path) -> None:
    """Holds what now lies at the path, if this process held what lay there: `compile --add` exchanges artifacts."""
    if artifact.resolve() in _held:
        hold(artifact)


def move_unless_held(artifact: Path, to: Path) -> bool:
    """Renames it in one step; False if a process holds it, or it cannot be moved."""
    try:
        with ExitStack() as stack:
            with suppress(FileNotFoundError):  # damaged: nobody holds it
                descriptor = _opened_to_lock_alone(artifact / _LOCKED)
                stack.callback(os.close, descriptor)
                if not _locked_alone(descriptor):
                    return False
            artifact.rename(to)
    except OSError:
        return False
    return True


def _locked(artifact: Path) -> int | None:
    """A descriptor with a lock that others may share; None if the artifact is gone."""
    try:
        descriptor = os.open(artifact / _LOCKED, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    with suppress(OSError):  # a file system without locks
        _flock(descriptor, alone=False)  # a collection has it for one rename at most
    # A collection that had it first has moved it away.
    with suppress(OSError):
        if os.path.samestat(os.fstat(descriptor), (artifact / _LOCKED).stat()):
            return descriptor
    os.close(descriptor)
    return None


def _opened_to_lock_alone(file: Path) -> int:
    """NFS locks alone only what is open for writing; a local file system also locks what cannot be written."""
    try:
        return os.open(file, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise
        return os.open(file, os.O_RDONLY | os.O_CLOEXEC)


def _locked_alone(descriptor: int) -> bool:
    try:
        _flock(descriptor, alone=True)
    except BlockingIOError:
        return False
    except OSError as error:
        # NFS, of a file that cannot be written: a holder cannot be seen, so there may be one. Others: a file system
        # without locks.
        return error.errno != errno.EBADF
    return True


def _flock(descriptor: int, *, alone: bool) -> None:
    """Waits for a lock that others may share, but not for one that they may not. Raises OSError."""
    import fcntl  # here, because the runtime imports this module, and Windows has no fcntl

    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB if alone else fcntl.LOCK_SH)
