"""manifest.json of an artifact: its schema, its checksums, and the files they cover.

`files` holds size and SHA-256 of each file copied from the model. `sha256` is the checksum of the manifest: of its
canonical JSON without this field. A manifest without checksums comes from an earlier llmc and holds only names; nothing
is compared.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from llmc.regular_file import JsonError, parse_json, read_regular

NAME = "manifest.json"
MAX_BYTES = 1 << 24
MAX_COPIED_BYTES = 1 << 28
"""Most bytes of a tokenizer or another copied file; the largest known ones have about 40 MB."""
OWN_SUM = "sha256"


class ManifestError(ValueError):
    """The manifest, or a file it lists, is damaged or missing. One sentence that names the file."""


def write_manifest(path: Path, manifest: Mapping[str, object]) -> None:
    """Writes JSON, keys in the given order, with its own checksum as the last key."""
    # As it will be read back: tuples become lists, keys become texts.
    content = json.loads(json.dumps(_content(manifest)))
    summed = {**content, OWN_SUM: _digest(content)}
    path.write_text(json.dumps(summed, indent=1, sort_keys=False) + "\n", encoding="utf-8")


def listed_files(folder: Path, names: Iterable[str]) -> dict[str, dict[str, object]]:
    """Size and SHA-256 of files in `folder`, in the form of the manifest's list."""
    found: dict[str, dict[str, object]] = {}
    for name in names:
        data = read_regular(folder / name, MAX_COPIED_BYTES)
        found[name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    return found


def read_manifest(artifact: Path) -> dict[str, Any]:
    """The manifest of an artifact. Every field present has a valid type and range.

    Raises ManifestError if it is missing or damaged, naming the first invalid field.
    """
    return checked_manifest(_undamaged(artifact), str(artifact / NAME))


def _undamaged(artifact: Path) -> dict[str, Any]:
    """The manifest, validated only by its own checksum. That takes a tenth of the time of the schema, whose library is
    large."""
    path = artifact / NAME
    try:
        manifest = parse_json(read_regular(path, MAX_BYTES))
    except OSError as error:
        raise ManifestError(f"cannot read {path}: {error.strerror or error}; is {artifact} an llmc artifact?") from None
    except JsonError as error:
        raise ManifestError(f"{path} is not valid JSON ({error}); compile the model again") from None
    if not isinstance(manifest, dict):
        raise ManifestError(f"{path} is not a JSON object; compile the model again")
    # A manifest with checksums of files has one of itself.
    has_sum = OWN_SUM in manifest or isinstance(manifest.get("files"), dict)
    if has_sum and manifest.get(OWN_SUM) != _digest(_content(manifest)):
        raise ManifestError(f"{path} is damaged: its SHA-256 is not the one that it says; compile the model again")
    return manifest


def checked_manifest(manifest: Any, origin: str) -> dict[str, Any]:
    """The JSON value if it conforms to the schema. Raises ManifestError, whose message begins with `origin`."""
    from llmc.manifest_schema import Manifest, complaint

    if not isinstance(manifest, dict):
        raise ManifestError(f"{origin} is not a JSON object; compile the model again")
    if (why := complaint(Manifest, manifest)) is not None:
        raise ManifestError(f"{origin} does not describe an artifact of this llmc ({why}); compile the model again")
    return manifest


def read_listed(folder: Path, name: str) -> bytes | None:
    """A copied file of an artifact, checked against the manifest; None if there is none.

    A file that the manifest does not list is not checked. Raises ManifestError for a listed file that is missing,
    differs, or cannot be read.
    """
    path, sums = folder / name, _sums(folder)
    try:
        data = read_regular(path, MAX_COPIED_BYTES)
    except FileNotFoundError:
        if name in sums:
            raise ManifestError(f"{path} is gone: compile the model again") from None
        return None
    except OSError as error:
        raise ManifestError(f"cannot read {path}: {error.strerror or error}; compile the model again") from None
    expected = sums.get(name)
    if expected is not None and (len(data), hashlib.sha256(data).hexdigest()) != expected:
        raise ManifestError(f"{path} is damaged: its SHA-256 is not the one in {NAME}; compile the model again")
    return data


def check_listed(folder: Path) -> int:
    """Checks all copied files of an artifact against its manifest; returns their number. Raises ManifestError."""
    read_manifest(folder)
    names = [name for name, expected in _sums(folder).items() if expected is not None]
    for name in names:
        read_listed(folder, name)
    return len(names)


def _sums(folder: Path) -> dict[str, tuple[int, str] | None]:
    """Bytes and SHA-256 of each listed file; None if an earlier llmc recorded only its name."""
    path = folder / NAME
    try:
        info = path.stat()
    except OSError:
        return {}  # a folder of tokenizer files
    return _read_sums(folder, info.st_ino, info.st_size, info.st_mtime_ns)


@lru_cache(maxsize=8)
def _read_sums(folder: Path, inode: int, size: int, time_ns: int) -> dict[str, tuple[int, str] | None]:
    files = _undamaged(folder).get("files") or []
    try:
        if isinstance(files, list):
            return dict.fromkeys(files)
        return {name: (entry["bytes"], entry["sha256"]) for name, entry in files.items()}
    except (TypeError, KeyError, AttributeError):
        raise ManifestError(f"{folder / NAME} has no valid list of files; compile the model again") from None


def _content(manifest: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in manifest.items() if name != OWN_SUM}


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
