"""A directory that appears whole or not at all: written beside its place, then renamed once."""

from __future__ import annotations

import ctypes
import fcntl
import glob
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from llmc.compiler.config import CompileError
from llmc.compiler.store.output import COPIED_FILES, OWN_FILES, check_output, is_artifact

# Marks a staging directory until it is complete: other programs may use the same naming.
_MARK = ".llmc-staging"
_STAGING_SUFFIX = re.compile(r"\.tmp-[0-9a-f]{8}")
# Linux: renameat2(2).
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


@contextmanager
def staged_directory(output: Path, *, keeps_others: bool = False) -> Iterator[Path]:
    """A new directory that becomes `output` if the block succeeds, and is removed otherwise.

    Directories left by killed compilations of `output` are removed too. keeps_others: the block carries over other
    files in the artifact at `output`, so they are allowed. Raises CompileError if `output` has foreign files, or if the
    disk cannot be written.
    """
    # A symbolic link to an artifact stays a link.
    output = Path(os.path.realpath(output)) if output.is_symlink() else output.absolute()
    check = is_artifact if keeps_others else check_output
    try:
        check(output)
        output.parent.mkdir(parents=True, exist_ok=True)
        drop_dead_staging(output)
        staging, lock = _locked_staging(output)
    except OSError as error:
        raise _unwritable(output, error) from None
    try:
        (staging / _MARK).touch()
        yield staging
        (staging / _MARK).unlink()
        for folder, _, files in os.walk(staging):
            for file in (Path(folder, name) for name in files):
                if file.is_file() and not file.is_symlink():
                    _sync(file)
            _sync(Path(folder))
        # Something may have appeared there meanwhile.
        check(output)
        _replace(staging, output)
        _sync(output.parent)
    except OSError as error:
        raise _unwritable(output, error) from None
    finally:
        shutil.rmtree(staging, ignore_errors=True)
        os.close(lock)


@contextmanager
def locked(artifact: Path) -> Iterator[None]:
    """Holds the lock of an artifact's directory; after waiting for one that was replaced, takes the new one's."""
    while True:
        try:
            lock = os.open(artifact, os.O_RDONLY | os.O_DIRECTORY)
        except OSError as error:
            raise CompileError(f"{artifact} is not an artifact: {error.strerror or error}") from None
        try:
            with suppress(OSError):  # a file system without locks
                fcntl.flock(lock, fcntl.LOCK_EX)
            if artifact.is_dir() and os.path.samestat(os.fstat(lock), artifact.stat()):
                yield
                return
        finally:
            os.close(lock)


def _unwritable(output: Path, error: OSError) -> CompileError:
    return CompileError(f"cannot write {output}: {error.strerror or error}; free space or choose another -o")


def _locked_staging(output: Path) -> tuple[Path, int]:
    """A new staging directory of `output`, and a descriptor that holds its lock while this process lives."""
    while True:
        staging = output.with_name(f"{output.name}.tmp-{secrets.token_hex(4)}")
        staging.mkdir()
        lock = os.open(staging, os.O_RDONLY)
        # On a file system without locks, nothing that looks dead is removed either.
        with suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX)
        # Before it was locked it looked dead; another compilation may have removed it.
        if staging.is_dir():
            return staging, lock
        os.close(lock)


def drop_dead_staging(output: Path) -> None:
    """Removes staging directories of `output` whose lock nobody holds."""
    for left in output.parent.glob(f"{glob.escape(output.name)}.tmp-*"):
        if not _STAGING_SUFFIX.fullmatch(left.name[len(output.name) :]):
            continue
        try:
            lock = os.open(left, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError:
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            pass
        else:
            if _is_staging(left):
                shutil.rmtree(left, ignore_errors=True)
        finally:
            os.close(lock)


def _is_staging(folder: Path) -> bool:
    """Whether a compilation made the directory: it has the mark, or contains only an artifact's files."""
    try:
        names = set(os.listdir(folder))
    except OSError:
        return False
    return _MARK in names or names <= {*OWN_FILES, *COPIED_FILES}


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _replace(staging: Path, output: Path) -> None:
    """Puts `staging` at `output`; the former content is then at `staging`, or gone."""
    if not os.path.lexists(output):
        staging.rename(output)
        return
    # In one step if the file system can: a kill leaves either the old artifact or the new one.
    if _exchange(staging, output):
        return
    old = output.with_name(f"{output.name}.old-{secrets.token_hex(4)}")
    output.rename(old)
    try:
        staging.rename(output)
    except OSError:
        old.rename(output)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _exchange(one: Path, other: Path) -> bool:
    """Swaps two directory entries atomically; False, without any change, if the system cannot."""
    rename = getattr(ctypes.CDLL(None), "renameat2", None)
    if rename is None:
        return False
    status: int = rename(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), ctypes.c_uint(_RENAME_EXCHANGE))
    return status == 0
