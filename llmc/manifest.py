"""manifest.json of an artifact: its schema, the checksums in it, and the files that they are of.

`files` says size and SHA-256 of each file that was copied from the model; `sha256` that of the manifest itself, of its
canonical JSON without this field. A manifest without them is of an earlier llmc: names alone, and nothing is compared.
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
"""Of a tokenizer or another copied file; the largest that are known have some 40 MB."""
OWN_SUM = "sha256"


class ManifestError(ValueError):
    """A manifest, or a file that it lists, that is damaged or missing; one sentence that names the file."""


def write_manifest(path: Path, manifest: Mapping[str, object]) -> None:
    """As JSON, keys in the order given, and its own checksum as the last of them."""
    # As it will be read back: tuples are lists, keys are texts.
    content = json.loads(json.dumps(_content(manifest)))
    summed = {**content, OWN_SUM: _digest(content)}
    path.write_text(json.dumps(summed, indent=1, sort_keys=False) + "\n", encoding="utf-8")


def listed_files(folder: Path, names: Iterable[str]) -> dict[str, dict[str, object]]:
    """Size and SHA-256 of files of `folder`, as a manifest lists them."""
    found: dict[str, dict[str, object]] = {}
    for name in names:
        data = read_regular(folder / name, MAX_COPIED_BYTES)
        found[name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    return found


def read_manifest(artifact: Path) -> dict[str, Any]:
    """The manifest of an artifact, with every field that it has of the right type and in range.

    Raises ManifestError for a missing or damaged one, naming the first field that is wrong.
    """
    return checked_manifest(_undamaged(artifact), str(artifact / NAME))


def _undamaged(artifact: Path) -> dict[str, Any]:
    """The manifest by its own checksum alone: that takes a tenth of the time of the schema, whose library is large."""
    path = artifact / NAME
    try:
        manifest = parse_json(read_regular(path, MAX_BYTES))
    except OSError as error:
        raise ManifestError(f"cannot read {path}: {error.strerror or error}; is {artifact} an llmc artifact?") from None
    except JsonError as error:
        raise ManifestError(f"{path} is not valid JSON ({error}); compile the model again") from None
    if not isinstance(manifest, dict):
        raise ManifestError(f"{path} is not a JSON object; compile the model again")
    # Who has sums of files has one of itself.
    has_sum = OWN_SUM in manifest or isinstance(manifest.get("files"), dict)
    if has_sum and manifest.get(OWN_SUM) != _digest(_content(manifest)):
        raise ManifestError(f"{path} is damaged: its SHA-256 is not the one that it says; compile the model again")
    return manifest


def checked_manifest(manifest: Any, origin: str) -> dict[str, Any]:
    """JSON that was read, if it is a manifest by the schema. Raises ManifestError that begins with `origin`."""
    from llmc.manifest_schema import Manifest, complaint

    if not isinstance(manifest, dict):
        raise ManifestError(f"{origin} is not a JSON object; compile the model again")
    if (why := complaint(Manifest, manifest)) is not None:
        raise ManifestError(f"{origin} does not describe an artifact of this llmc ({why}); compile the model again")
    return manifest


def read_listed(folder: Path, name: str) -> bytes | None:
    """A copied file of an artifact, compared with the manifest; None where there is none.

    A file that the manifest does not list is taken as it is. Raises ManifestError for one that is listed and gone, that
    differs, or that cannot be read.
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
    """Compares all copied files of an artifact with its manifest; returns how many. Raises ManifestError."""
    read_manifest(folder)
    names = [name for name, expected in _sums(folder).items() if expected is not None]
    for name in names:
        read_listed(folder, name)
    return len(names)


def _sums(folder: Path) -> dict[str, tuple[int, str] | None]:
    """Bytes and SHA-256 of each listed file, None where an earlier llmc noted its name alone."""
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
