"""Checks, before a model is loaded or a long run begins, that what is asked for can be written in the end."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Mapping
from pathlib import Path


class OutputError(ValueError):
    """Nothing can be written to a path; the message is one sentence with the flag, the path and why."""


def check_outputs(
    replaced: Mapping[str, Path | None],
    *,
    appended: Mapping[str, Path | None] | None = None,
    folders: Mapping[str, Path | None] | None = None,
) -> None:
    """Paths by flag, None where it is not given. Leaves nothing behind. Raises OutputError.

    replaced: files that `write_replaced` writes. appended: files that grow in place. folders: made where they are
    missing, with their parents.
    """
    for paths, check in ((replaced, _replace), (appended or {}, _append), (folders or {}, _fill)):
        for flag, path in paths.items():
            try:
                if path is not None:
                    check(path)
            except OSError as error:
                raise OutputError(
                    f"cannot write {flag} {path}: {error.strerror or error}; name another path"
                ) from error


def _replace(path: Path) -> None:
    real = Path(os.path.realpath(path))
    if not _is_special(real):
        _make_beside(real)


def _append(path: Path) -> None:
    real = Path(os.path.realpath(path))
    if _is_special(real):
        return
    if real.exists():
        os.close(os.open(real, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC))
    else:
        _make_beside(real)


def _fill(path: Path) -> None:
    real = Path(os.path.realpath(path))
    while not os.path.lexists(real):
        real = real.parent
    if not stat.S_ISDIR(os.stat(real).st_mode):
        raise NotADirectoryError(errno.ENOTDIR, f"{real} is not a directory")
    _make_beside(real / "file")


def _is_special(path: Path) -> bool:
    """Whether the path is a device or a pipe, which is not opened: that may do something, or wait. Raises OSError."""
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        return False
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, "it is a directory")
    if stat.S_ISREG(mode):
        return False
    if not os.access(path, os.W_OK):
        raise PermissionError(errno.EACCES, "it may not be written to")
    return True


def _make_beside(path: Path) -> None:
    """Makes a file with a name of its own in the path's folder, and removes it. Raises OSError."""
    if not path.parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, f"there is no directory {path.parent}")
    new = path.with_name(f".llmc.{os.getpid()}.{secrets.token_hex(4)}")
    os.close(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    with contextlib.suppress(OSError):
        new.unlink()
