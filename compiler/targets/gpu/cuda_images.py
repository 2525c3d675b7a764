"""Writes code files for devices of kind cuda (FORMAT.md): kernel images, each for some architectures."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from llmc.cuda_code import HEADER, MAGIC, RECORD, VERSION, Image, unpack

_AWAITS = 1
"""Flag of a file: code for compute capabilities from 9.0 on waits for earlier kernels."""
_ALIGNMENT = 64


def pack(images: Iterable[Image], num_kernels: int, *, awaits: bool = False) -> bytes:
    """Serializes a code file; deterministic. awaits: code from compute capability 9.0 on waits for earlier kernels."""
    listed = list(images)
    at = HEADER.size + len(listed) * RECORD.size
    records, data = [], bytearray()
    for image in listed:
        data += b"\0" * (-(at + len(data)) % _ALIGNMENT)
        offset = at + len(data)
        records.append(RECORD.pack(image.kernel, image.kind, image.capability, image.exact, offset, len(image.code)))
        data += image.code
    header = HEADER.pack(MAGIC, VERSION, num_kernels, len(listed), _AWAITS if awaits else 0, at + len(data))
    return b"".join((header, *records, bytes(data)))


def awaits(file: bytes) -> bool:
    """Whether kernels of a code file wait for earlier ones."""
    return bool(HEADER.unpack_from(file)[4] & _AWAITS)


def joined(files: Sequence[bytes]) -> bytes:
    """One code file made of single-kernel files, in order."""
    images = [
        Image(kernel, image.kind, image.capability, image.exact, image.code)
        for kernel, file in enumerate(files)
        for image in unpack(file)
    ]
    return pack(images, len(files), awaits=all(map(awaits, files)))
