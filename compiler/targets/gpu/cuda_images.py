"""Code files for devices of kind cuda (FORMAT.md): kernel images, each for some architectures."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

CUBIN, PTX = 0, 1
_AWAITS = 1
"""Flag of a file: code for compute capabilities from 9.0 on waits for earlier kernels."""
_MAGIC, _VERSION = b"LLMCCUDA", 1
_HEADER, _RECORD = struct.Struct("<8s4IQ"), struct.Struct("<4I2Q")
_ALIGNMENT = 64


@dataclass(frozen=True)
class Image:
    """The code of one kernel. capability: 10 × major + minor of a compute capability. exact: runs on that one only."""

    kernel: int
    kind: int
    capability: int
    exact: bool
    code: bytes


def pack(images: Iterable[Image], num_kernels: int, *, awaits: bool = False) -> bytes:
    """Serializes a code file; deterministic. awaits: code from compute capability 9.0 on waits for earlier kernels."""
    listed = list(images)
    at = _HEADER.size + len(listed) * _RECORD.size
    records, data = [], bytearray()
    for image in listed:
        data += b"\0" * (-(at + len(data)) % _ALIGNMENT)
        offset = at + len(data)
        records.append(_RECORD.pack(image.kernel, image.kind, image.capability, image.exact, offset, len(image.code)))
        data += image.code
    header = _HEADER.pack(_MAGIC, _VERSION, num_kernels, len(listed), _AWAITS if awaits else 0, at + len(data))
    return b"".join((header, *records, bytes(data)))


def unpack(file: bytes) -> list[Image]:
    """The inverse of `pack`; trusts its input."""
    magic, version, _, count, _, _ = _HEADER.unpack_from(file)
    assert (magic, version) == (_MAGIC, _VERSION)
    images = []
    for i in range(count):
        kernel, kind, capability, exact, offset, size = _RECORD.unpack_from(file, _HEADER.size + i * _RECORD.size)
        images.append(Image(kernel, kind, capability, bool(exact), file[offset : offset + size]))
    return images


def awaits(file: bytes) -> bool:
    """Whether kernels of a code file wait for earlier ones."""
    return bool(_HEADER.unpack_from(file)[4] & _AWAITS)


def joined(files: Sequence[bytes]) -> bytes:
    """One code file made of single-kernel files, in order."""
    images = [
        Image(kernel, image.kind, image.capability, image.exact, image.code)
        for kernel, file in enumerate(files)
        for image in unpack(file)
    ]
    return pack(images, len(files), awaits=all(map(awaits, files)))
