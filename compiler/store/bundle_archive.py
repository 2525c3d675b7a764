"""Untrusted zip files: nothing is extracted, and nothing is decompressed beyond its declared and permitted size."""

from __future__ import annotations

import stat
import struct
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from llmc.regular_file import open_regular

MAX_MEMBERS = 4096
MAX_FILE_BYTES = 1 << 32
_CHUNK_BYTES = 1 << 20
# Everything that the library raises for invalid or unsupported zip files.
_DAMAGE = (zipfile.BadZipFile, zlib.error, EOFError, KeyError, IndexError, ValueError, OverflowError,
           NotImplementedError, RuntimeError, struct.error)  # fmt: skip


class ArchiveError(ValueError):
    """A file that is not a valid zip file for a bundle; the message is part of a sentence."""


class Archive:
    """The members of a zip file, by name."""

    def __init__(self, file: zipfile.ZipFile) -> None:
        self._file = file
        self.names = frozenset(file.namelist())
        if len(self.names) != len(file.infolist()):
            raise ArchiveError("it has two members of one name")
        if len(self.names) > MAX_MEMBERS:
            raise ArchiveError(f"it has {len(self.names)} members, more than {MAX_MEMBERS}")
        for info in file.infolist():
            if stat.S_ISLNK(info.external_attr >> 16) or info.is_dir():
                raise ArchiveError(f"its member {info.filename[:80]!a} is not a file")
            # Other compression methods may use unbounded memory.
            if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                raise ArchiveError(f"its member {info.filename[:80]!a} is packed by method {info.compress_type}")

    def read(self, name: str, most: int, declared: int | None = None) -> bytes:
        """A member of at most `most` bytes, and of exactly `declared` if given. Raises ArchiveError."""
        if name not in self.names:
            raise ArchiveError(f"it has no member {name}")
        size = self._file.getinfo(name).file_size
        if size > most:
            raise ArchiveError(f"{name} is larger than {most} bytes")
        if declared is not None and size != declared:
            raise ArchiveError(f"{name} has {size} bytes, not the {declared} of the index")
        parts, left = [], size + 1
        with reading(), self._file.open(name) as member:
            # The archive's own statement of a member's size is not trusted either.
            while left and (chunk := member.read(min(left, _CHUNK_BYTES))):
                parts.append(chunk)
                left -= len(chunk)
        if left != 1:
            raise ArchiveError(f"{name} does not have the {size} bytes that the archive says")
        return b"".join(parts)


@contextmanager
def reading() -> Iterator[None]:
    """Turns errors from a damaged zip file into ArchiveError."""
    try:
        yield
    except ArchiveError:
        raise
    except _DAMAGE as error:
        why = " ".join(str(error).split())[:200]
        raise ArchiveError(why or type(error).__name__) from None


@contextmanager
def opened(path: Path) -> Iterator[Archive]:
    """Opens a zip file. Raises ArchiveError for an invalid one, OSError if it cannot be read."""
    with open_regular(path) as file:
        size = file.seek(0, 2)
        if size > MAX_FILE_BYTES:
            raise ArchiveError(f"it has {size} bytes, more than {MAX_FILE_BYTES}")
        with reading():
            archive = zipfile.ZipFile(file)
        with archive:
            yield Archive(archive)
