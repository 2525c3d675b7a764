"""Opens a checkpoint's files: only regular files inside it."""

from __future__ import annotations

import os
from io import BufferedReader
from pathlib import Path

from llmc.models.errors import ModelError
from llmc.regular_file import open_regular, read_regular

_HUB_REPO, _SNAPSHOTS = "models--", "snapshots"


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


def open_file(path: Path) -> BufferedReader:
    """Opens a checkpoint's file for reading. Raises ModelError for a link as in `resolved_file`, and
    FileNotFoundError."""
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
        open_file(path).close()
    except FileNotFoundError:
        return False
    return True


def read_file(path: Path, most_bytes: int) -> bytes:
    """The content of a small file. Raises ModelError for a link as in `resolved_file`, and OSError, also beyond
    `most_bytes`."""
    return read_regular(resolved_file(path), most_bytes)


def _home(checkpoint: Path) -> Path:
    """The folder that may hold a checkpoint's files: itself or, for a snapshot, its repository."""
    for snapshot in (checkpoint, checkpoint.parent):
        repository = snapshot.parent.parent
        if snapshot.parent.name == _SNAPSHOTS and repository.name.startswith(_HUB_REPO):
            return repository
    return checkpoint
