"""One mapped GGUF file with a fully checked header: no count or offset is used before it is checked against the
size."""

from __future__ import annotations

import math
import mmap
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from llmc.models.brief import brief, brief_name
from llmc.models.convert import Array
from llmc.models.errors import ModelError
from llmc.models.files import open_file, open_followed
from llmc.models.sources.gguf.metadata import Metadata
from llmc.models.sources.gguf.types import READ, StoredType, type_name
from llmc.models.sources.gguf.values import Cursor
from llmc.models.sources.mapped import release

MAGIC = b"GGUF"
_VERSIONS = (2, 3)
# Python objects of a header take many times its bytes; real headers have dozens of keys and thousands of tensors.
_MAX_KEYS, _MAX_TENSORS = 1 << 16, 100_000
_MAX_DIMENSIONS, _MAX_NAME_BYTES, _MAX_ALIGNMENT = 4, 255, 1 << 20
_DEFAULT_ALIGNMENT = 32
# Minimum bytes of an entry: length, type and a byte; or length, dimensions, type, offset.
_LEAST_KEY_BYTES, _LEAST_TENSOR_BYTES = 8 + 4 + 1, 8 + 4 + 8 + 4 + 8


@dataclass(frozen=True)
class Entry:
    """A tensor of a file. shape: in numpy's order, columns last. begin, end: byte offsets in the file."""

    shape: tuple[int, ...]
    type: StoredType
    begin: int
    end: int


class GgufFile:
    """A file and its header. followed: the path may be a link to anywhere, because a user gave it."""

    def __init__(self, path: Path, *, followed: bool = False) -> None:
        self.path = path
        try:
            with open_followed(path) if followed else open_file(path) as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except FileNotFoundError:
            raise ModelError(f"{path} does not exist; download it, or name the file that is there") from None
        except ValueError:
            raise ModelError(f"{path} is empty; download the file again") from None
        except OSError as error:
            raise ModelError(f"{path} cannot be read: {error.strerror}") from error
        cursor = Cursor(memoryview(self._map), str(path))
        num_tensors, num_keys = _counts(cursor)
        self.metadata = Metadata(_pairs(cursor, num_keys), str(path))
        self.tensors = self._entries(cursor, num_tensors)
        self._check_overlaps(cursor)

    def _entries(self, cursor: Cursor, count: int) -> dict[str, Entry]:
        alignment = self.metadata.integer("general.alignment", _DEFAULT_ALIGNMENT, maximum=_MAX_ALIGNMENT)
        if alignment & (alignment - 1) or alignment < 8:
            raise self.metadata.wrong("general.alignment", "a power of two of at least 8")
        named = [self._described(cursor, number) for number in range(count)]
        start = -(-cursor.at // alignment) * alignment
        found: dict[str, Entry] = {}
        for name, shape, type, offset in named:
            called = f"tensor {brief_name(name)}"
            if name in found:
                raise cursor.broken(f"{called} is there twice")
            if offset % alignment:
                raise cursor.broken(f"{called} begins at offset {offset}, which is not a multiple of {alignment}")
            begin = start + offset
            end = begin + math.prod(shape[:-1]) * type.row_bytes(shape[-1])
            if end > len(cursor.data):
                raise cursor.broken(f"{called} of shape {list(shape)} ends at byte {end} of {len(cursor.data)}")
            found[name] = Entry(shape, type, begin, end)
        return found

    def _described(self, cursor: Cursor, number: int) -> tuple[str, tuple[int, ...], StoredType, int]:
        name = cursor.text(f"the name of tensor {number}", _MAX_NAME_BYTES)
        called = f"tensor {brief_name(name)}"
        dimensions = cursor.number("<I", f"the number of dimensions of {called}")
        if not 1 <= dimensions <= _MAX_DIMENSIONS:
            raise cursor.broken(f"{called} has {dimensions} dimensions, not 1 to {_MAX_DIMENSIONS}")
        sizes = [cursor.number("<Q", f"the shape of {called}") for _ in range(dimensions)]
        if not all(1 <= size < 1 << 63 for size in sizes):
            raise cursor.broken(f"{called} has dimensions {sizes}")
        code = cursor.number("<I", f"the type of {called}")
        if code not in READ:
            names = ", ".join(type.name for type in READ.values())
            raise ModelError(f"{self.path}: {called} has type {type_name(code)}, which is not one of {names}")
        type = READ[code]
        if sizes[0] % type.elements:
            raise cursor.broken(f"{called} of type {type.name} has rows of {sizes[0]}, no multiple of {type.elements}")
        return name, tuple(reversed(sizes)), type, cursor.number("<Q", f"the offset of {called}")

    def _check_overlaps(self, cursor: Cursor) -> None:
        """Raises ModelError if a byte belongs to two tensors."""
        by_place = sorted(self.tensors.items(), key=lambda item: (item[1].begin, item[1].end))
        for (name, entry), (next_name, next_entry) in pairwise(by_place):
            if next_entry.begin < entry.end:
                raise cursor.broken(
                    f"tensor {brief_name(next_name)} begins at byte {next_entry.begin}, before tensor "
                    f"{brief_name(name)} ends at {entry.end}"
                )

    def release(self) -> None:
        release(self._map)

    def rows(self, name: str) -> Array:
        """The bytes of a tensor, uint8 [rows, bytes of a row]; a vector has one row."""
        entry = self.tensors[name]
        count = math.prod(entry.shape[:-1])
        data: Array = np.ndarray((count, (entry.end - entry.begin) // count), np.uint8, self._map, entry.begin)
        return data


def _counts(cursor: Cursor) -> tuple[int, int]:
    """(number of tensors, number of metadata entries)."""
    origin, start = cursor.origin, bytes(cursor.data[:4])
    if start != MAGIC:
        raise ModelError(f"{origin} is not a GGUF file: it begins with {brief(start)}, not with {brief(MAGIC)}")
    cursor.at = 4
    version = cursor.number("<I", "the version")
    if version not in _VERSIONS:
        if version & 0xFFFF == 0 and version:
            raise ModelError(f"{origin} is a GGUF file for big-endian machines; convert it for little-endian ones")
        raise ModelError(f"{origin} is GGUF of version {version}; llmc reads versions 2 and 3: convert the model again")
    num_tensors = cursor.count("the number of tensors", _LEAST_TENSOR_BYTES)
    num_keys = cursor.count("the number of metadata", _LEAST_KEY_BYTES)
    for what, number, most in (("tensors", num_tensors, _MAX_TENSORS), ("metadata", num_keys, _MAX_KEYS)):
        if number > most:
            raise cursor.broken(f"the number of {what} is {number}, more than {most}")
    return num_tensors, num_keys


def _pairs(cursor: Cursor, count: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for number in range(count):
        key = cursor.key(number)
        if key in found:
            raise cursor.broken(f"metadata {brief_name(key)} is there twice")
        found[key] = cursor.value(brief_name(key))
    return found
