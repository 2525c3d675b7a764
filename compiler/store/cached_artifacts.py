"""Artifacts that `llmc run` and `llmc serve` compiled implicitly from model directories: `ROOT/artifacts/KEY`.

A directory's modification time is its last use. A collection leaves those that a process holds.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from dataclasses import dataclass
from pathlib import Path

from llmc.compiler.store.staging import drop_dead_staging
from llmc.held_artifact import ARTIFACTS, CACHED_NAME, artifact_name, drop_lock, move_unless_held

_GOING = ".going-"


@dataclass(frozen=True)
class CachedArtifact:
    """file_bytes: of all its files. last_used: seconds since the epoch."""

    key: str
    path: Path
    file_bytes: int
    last_used: float


def artifacts_folder(root: Path) -> Path:
    """The folder of whole artifacts in the cache `root`."""
    return root / ARTIFACTS


def mark_used(artifact: Path) -> None:
    """Marks a cached artifact as used now."""
    # A read-only cache still serves.
    with contextlib.suppress(OSError):
        os.utime(artifact)


def cached_artifacts(root: Path) -> list[CachedArtifact]:
    """The cached artifacts, in order of keys; one that vanishes meanwhile is skipped."""
    found = []
    for path in _listing(artifacts_folder(root)):
        if not CACHED_NAME.fullmatch(path.name):
            continue
        with contextlib.suppress(OSError):
            size = sum(file.stat().st_size for file in path.iterdir())
            found.append(CachedArtifact(path.name, path, size, path.stat().st_mtime))
    return found


def remove_artifact(artifact: CachedArtifact) -> bool:
    """Removes it atomically; False if a process uses it, or it cannot be removed."""
    going = artifact.path.with_name(f"{_GOING}{secrets.token_hex(8)}")
    if not move_unless_held(artifact.path, going):
        return False
    shutil.rmtree(going, ignore_errors=True)
    return True


def drop_leftovers(root: Path) -> None:
    """Removes leftovers of killed compilations and collections."""

    folder = artifacts_folder(root)
    for path in _listing(folder):
        key, _, rest = path.name.partition(".tmp-")
        if path.name.startswith(_GOING):
            shutil.rmtree(path, ignore_errors=True)
        elif rest and CACHED_NAME.fullmatch(key):
            drop_dead_staging(folder / key)
        elif (name := artifact_name(path)) is not None and CACHED_NAME.fullmatch(name):
            drop_lock(folder / name)


def _listing(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []
