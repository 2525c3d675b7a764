"""A cached artifact that a process uses, and that `llmc cache gc` therefore leaves.

The lock is a file beside the artifact, since `llmc compile --add` puts another directory in the artifact's place.
"""

from __future__ import annotations

import errno
import os
import re
import threading
from contextlib import ExitStack, suppress
from pathlib import Path

ARTIFACTS = "artifacts"
"""Name of the folder of whole artifacts in a cache."""
CACHED_NAME = re.compile(r"[0-9a-f]{64}")
"""The names of artifacts in a cache: keys of what they are made from."""
_SUFFIX = ".held"
_INSIDE = "graphs.bin"
"""Locked instead in a cache that this process cannot write. Another one may collect it."""
_UNWRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT)
_MOST_TRIES = 10
_held: dict[Path, int] = {}  # descriptors with a lock, by resolved path of the artifact
_mutex = threading.Lock()


def lock_file(artifact: Path) -> Path:
    """The file beside an artifact by which processes hold it."""
    return artifact.with_name(f"{artifact.name}{_SUFFIX}")


def artifact_name(lock: Path) -> str | None:
    """Name of the artifact that a file is the lock of; None if it is none."""
    return lock.name.removesuffix(_SUFFIX) if lock.name.endswith(_SUFFIX) else None


def hold(artifact: Path) -> bool:
    """Holds a cached artifact until this process ends; False if it is gone. Any number of processes may hold one."""
    path = artifact.parent.resolve() / artifact.name  # a link is held, not what it leads to: collections move the link
    with _mutex:
        descriptor = _locked(path)
        if descriptor is None:
            return False
        # The same lock, unless somebody has removed the artifact by hand.
        former = _held.pop(path, None)
        if former is not None:
            os.close(former)
        _held[path] = descriptor
    return True


def hold_if_cached(artifact: Path) -> bool:
    """Holds the artifact if its path, or what that leads to, is one in a cache; false if it is gone."""
    cached = {path for path in (artifact.absolute(), artifact.resolve()) if _is_cached(path)}
    return all(map(hold, cached))


def move_unless_held(artifact: Path, to: Path) -> bool:
    """Renames it in one step; False if a process holds it, or it cannot be moved."""
    lock, unlocked = lock_file(artifact), list[Path]()
    try:
        with ExitStack() as stack:
            for file in (lock, artifact / _INSIDE):
                descriptor = _opened_to_lock_alone(file, create=file == lock)
                if descriptor is None:  # nobody holds it
                    unlocked.append(file)
                    continue
                stack.callback(os.close, descriptor)
                if not _locked_alone(descriptor) or not _lies_at(descriptor, file):
                    return False
            if lock in unlocked and lock.exists():  # there is room for one by now, and somebody has made it
                return False
            artifact.rename(to)
            lock.unlink(missing_ok=True)
    except OSError:
        return False
    return True


def drop_lock(artifact: Path) -> None:
    """Removes the lock of an artifact that is gone, unless a process is about to hold it."""
    lock = lock_file(artifact)
    with suppress(OSError), ExitStack() as stack:
        descriptor = _opened_to_lock_alone(lock, create=False)
        if descriptor is None:
            return
        stack.callback(os.close, descriptor)
        if _locked_alone(descriptor) and _lies_at(descriptor, lock) and not artifact.exists():
            lock.unlink()


def _is_cached(artifact: Path) -> bool:
    return artifact.parent.name == ARTIFACTS and CACHED_NAME.fullmatch(artifact.name) is not None


def _locked(artifact: Path) -> int | None:
    """A descriptor with a lock that others may share; None if the artifact is gone, or is exchanged again and again."""
    for _ in range(_MOST_TRIES):
        if not _is_there(artifact / _INSIDE):
            break
        file = lock_file(artifact)
        descriptor = _opened_to_share(file)
        if descriptor is None:
            file = artifact / _INSIDE
            descriptor = _opened_to_share(file, create=False)
            if descriptor is None:
                return None
        with suppress(OSError):  # a file system without locks
            _flock(descriptor, alone=False)  # a collection has it for one rename at most
        # A collection that had it first has removed it, and the artifact.
        if _lies_at(descriptor, file) and _is_there(artifact / _INSIDE):
            return descriptor
        os.close(descriptor)
    drop_lock(artifact)
    return None


def _is_there(file: Path) -> bool:
    """False where this process may not look, too."""
    try:
        return file.exists()
    except OSError:
        return False


def _lies_at(descriptor: int, file: Path) -> bool:
    """Whether an open file is still the one of that name."""
    try:
        return os.path.samestat(os.fstat(descriptor), file.stat())
    except OSError:
        return False


def _opened_to_share(file: Path, *, create: bool = True) -> int | None:
    """None where it is not there, and cannot be made."""
    # Another user's cannot be written.
    for flags in (os.O_RDWR | os.O_CREAT, os.O_RDONLY) if create else (os.O_RDONLY,):
        with suppress(OSError):
            return os.open(file, flags | os.O_CLOEXEC, 0o666)
    return None


def _opened_to_lock_alone(file: Path, *, create: bool) -> int | None:
    """None where it is not there, and cannot be made, as on a full disk. Raises OSError.

    NFS locks alone only what is open for writing; a local file system also locks what cannot be written.
    """
    for flags in (os.O_RDWR | os.O_CREAT, os.O_RDWR)[not create :]:
        try:
            return os.open(file, flags | os.O_CLOEXEC, 0o666)
        except FileNotFoundError:
            return None
        except OSError as error:
            if error.errno not in _UNWRITABLE:
                raise
    try:
        return os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None


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
