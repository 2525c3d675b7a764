"""Checks every byte of an artifact against the checksums in graphs.bin and manifest.json (FORMAT.md).

In Python, so that it works without the artifact's instruction set; `binding.Artifact.verify` is the native check.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from llmc.graphs_records import Tables
from llmc.manifest import ManifestError, check_listed
from llmc.regular_file import open_regular
from llmc.runtime.graphs_checks import FormatError

Progress = Callable[[int, int], None]
"""Called with (bytes read, bytes in all)."""

_CHUNK_BYTES = 4 << 20


@dataclass(frozen=True)
class Damage:
    """A damaged range of a file. what: the tensor or part; offset and size in bytes."""

    file: str
    what: str
    offset: int
    bytes: int

    def __str__(self) -> str:
        return f"{self.what} at byte {self.offset} of {self.file} ({self.bytes} bytes)"


@dataclass(frozen=True)
class _Part:
    file: str
    what: str
    offset: int
    bytes: int
    crc32: int | None  # None for padding, which must be zero


def verify_artifact(artifact: Path, tables: Tables, progress: Progress = lambda done, total: None) -> list[Damage]:
    """All damaged parts of the code files and weights.safetensors, in file order. tables: of graphs.bin.

    Raises FormatError if a file is missing, has another size, or cannot be read. Also if the manifest, or a file copied
    from the model, is damaged.
    """
    try:
        check_listed(artifact)
    except ManifestError as error:
        raise FormatError(str(error)) from None
    parts = _parts(artifact, tables)
    total = sum(part.bytes for part in parts)
    done = 0
    damaged = []
    for part in parts:
        crc, zero = 0, True
        try:
            with open_regular(artifact / part.file) as file:
                file.seek(part.offset)
                left = part.bytes
                while left:
                    chunk = file.read(min(left, _CHUNK_BYTES))
                    if not chunk:
                        raise FormatError(f"{artifact / part.file} ends inside {part.what}: compile the model again")
                    crc = zlib.crc32(chunk, crc)
                    zero = zero and not any(chunk) if part.crc32 is None else zero
                    left -= len(chunk)
                    done += len(chunk)
                    progress(done, total)
        except OSError as error:
            raise FormatError(f"cannot read {artifact / part.file}: {error.strerror or error}") from None
        if (part.crc32 is None and not zero) or (part.crc32 is not None and crc != part.crc32):
            damaged.append(Damage(part.file, part.what, part.offset, part.bytes))
    return damaged


def _parts(artifact: Path, tables: Tables) -> list[_Part]:
    """All bytes of the files besides graphs.bin, each in exactly one part."""
    header = tables.header
    weights = "weights.safetensors"
    parts = [
        *(_Part(code.name, "the code", 0, code.bytes, code.crc32) for code in tables.code),
        _Part(weights, "the header", 0, _header_bytes(artifact / weights), header.weights_header_crc32),
    ]
    for weight in tables.weights:
        end = parts[-1].offset + parts[-1].bytes
        parts.append(_Part(weights, "padding", end, weight.file_offset - end, None))
        parts.append(_Part(weights, f"weight {weight.name!r}", weight.file_offset, weight.bytes, weight.crc32))
    end = parts[-1].offset + parts[-1].bytes
    parts.append(_Part(weights, "padding", end, header.weights_bytes - end, None))
    for part in parts:
        if part.bytes < 0:
            raise FormatError(f"{artifact / weights} has a damaged header: it reaches into {part.what}")
    return parts


def _header_bytes(path: Path) -> int:
    """Size of a safetensors header, with its length prefix."""
    try:
        with open_regular(path) as file:
            length = int.from_bytes(file.read(8), "little")
    except OSError as error:
        raise FormatError(f"cannot read {path}: {error.strerror or error}") from None
    return 8 + length
