"""Opens the files of a checkpoint: regular ones that lie in it, and nothing else."""

from __future__ import annotations

import os
from io import BufferedReader
from pathlib import Path

from llmc.models.errors import ModelError
from llmc.regular_file import open_regular, read_regular

_HUB_REPO, _SNAPSHOTS = "models--", "snapshots"


def resolved_file(path: Path) -> Path:
    """Where the file `path` of the checkpoint path.parent really is.

    A link may lead to another file of the checkpoint; in a snapshot of the hub's cache, to any file of the same
    repository. Raises ModelError for one that leads elsewhere, or to nothing.
    """
    target = Path(os.path.realpath(path))
    if not target.is_relative_to(_home(Path(os.path.realpath(path.parent)))):
        raise ModelError(f"{path} is a link to {target}, which is outside the checkpoint; put the file itself there")
    if path.is_symlink() and not os.path.lexists(target):
        raise ModelError(f"{path} is a link to {target}, which does not exist; put the file itself there")
    return target


def open_file(path: Path) -> BufferedReader:
    """A file of a checkpoint to read from. Raises ModelError for a link, see above, and FileNotFoundError."""
    target = resolved_file(path)
    try:
        return open_regular(target)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}; put a regular file there") from error


def has_file(path: Path) -> bool:
    """Whether the checkpoint path.parent has the file `path`; raises ModelError where something else has its name."""
    try:
        open_file(path).close()
    except FileNotFoundError:
        return False
    return True


def read_file(path: Path, most_bytes: int) -> bytes:
    """All of a small file. Raises ModelError for a link, see above, and OSError, also for more than `most_bytes`."""
    return read_regular(resolved_file(path), most_bytes)


def _home(checkpoint: Path) -> Path:
    """The folder that the files of a checkpoint lie in: itself, or the repository that it is, or is part of, a snapshot
    of."""
    for snapshot in (checkpoint, checkpoint.parent):
        repository = snapshot.parent.parent
        if snapshot.parent.name == _SNAPSHOTS and repository.name.startswith(_HUB_REPO):
            return repository
    return checkpoint
