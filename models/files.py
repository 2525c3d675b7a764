"""Opens a checkpoint's files: only regular files inside it."""

from __future__ import annotations

import os
from io import BufferedReader
from pathlib import Path

from llmc.models.errors import ModelError
from llmc.regular_file import open_regular, read_regular, why_pointer

_HUB_REPO, _SNAPSHOTS = "models--", "snapshots"
_BEGIN_BYTES = 64


def resolved_file(path: Path) -> Path:
    """The real path of the file `path` in the checkpoint path.parent.

    A link may lead to another file of the checkpoint or, in a snapshot of the hub's cache, of the same repository.
    Raises ModelError for any other link, or a dangling one.
    """
    target = Path(os.path.realpath(path))
    if not target.is_relative_to(_home(Path(os.path.realpath(path.parent)))):
        raise ModelError(f"{path} is a link to {target}, which is outside the checkpoint; put the file itself there")
    if path.is_symlink() and not os.path.lexists(target):
        raise ModelError(f"{path} is a link to {target}, which does not exist; put the file itself there")
    return target


def _check_content(path: Path, begin: bytes) -> None:
    if (why := why_pointer(begin)) is not None:
        raise ModelError(f"{path} {why}")


def open_file(path: Path) -> BufferedReader:
    """Opens a checkpoint's file for reading. Raises ModelError for a link as in `resolved_file`, for a pointer of Git
    LFS, and FileNotFoundError."""
    return _checked(path, _open(path))


def open_followed(path: Path) -> BufferedReader:
    """Opens a file that a user named, which may be a link to anywhere. Raises OSError, and ModelError for a pointer of
    Git LFS."""
    return _checked(path, open_regular(path))


def _checked(path: Path, file: BufferedReader) -> BufferedReader:
    try:
        _check_content(path, file.peek(_BEGIN_BYTES))
    except BaseException:
        file.close()
        raise
    return file


def _open(path: Path) -> BufferedReader:
    target = resolved_file(path)
    try:
        return open_regular(target)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}; put a regular file there") from error


def has_file(path: Path) -> bool:
    """Whether the checkpoint has the file `path`. Raises ModelError if something else has its name."""
    try:
        _open(path).close()
    except FileNotFoundError:
        return False
    return True


def read_file(path: Path, most_bytes: int) -> bytes:
    """The content of a small file. Raises ModelError as `open_file` does, and OSError, also beyond `most_bytes`."""
    content = read_regular(resolved_file(path), most_bytes)
    _check_content(path, content)
    return content


def _home(checkpoint: Path) -> Path:
    """The folder that may hold a checkpoint's files: itself or, for a snapshot, its repository."""
    for snapshot in (checkpoint, checkpoint.parent):
        repository = snapshot.parent.parent
        if snapshot.parent.name == _SNAPSHOTS and repository.name.startswith(_HUB_REPO):
            return repository
    return checkpoint
