"""Images of a code file for devices of kind cuda (FORMAT.md), and the GPUs that run them. For compiler and runtime."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

CUBIN, PTX = 0, 1
MAGIC, VERSION = b"LLMCCUDA", 1
HEADER, RECORD = struct.Struct("<8s4IQ"), struct.Struct("<4I2Q")
_EMBEDDED = frozenset({87, 101})
"""Capabilities of Tegra. Their machine code runs on no other GPU, and they run no other one's."""


@dataclass(frozen=True)
class Image:
    """The code of one kernel. capability: 10 × major + minor of a compute capability. exact: runs on that one only."""

    kernel: int
    kind: int
    capability: int
    exact: bool
    code: bytes

    def runs_on(self, device: int) -> bool:
        """Whether a GPU of this capability runs it. The rule is that of CuImage::RunsOn (cu_code.h)."""
        if self.exact or self.capability == device:
            return self.capability == device
        if self.kind == PTX:
            return self.capability < device
        same = self.capability // 10 == device // 10
        return same and self.capability < device and not _EMBEDDED & {self.capability, device}


def all_run_on(images: Iterable[Image], device: int) -> bool:
    """Whether each kernel has an image that a GPU of this capability runs."""
    listed = list(images)
    return {image.kernel for image in listed} == {image.kernel for image in listed if image.runs_on(device)}


def unpack(file: bytes) -> list[Image]:
    """The images of a code file, in order. Trusts its input."""
    magic, version, _, count, _, _ = HEADER.unpack_from(file)
    assert (magic, version) == (MAGIC, VERSION)
    images = []
    for i in range(count):
        kernel, kind, capability, exact, offset, size = RECORD.unpack_from(file, HEADER.size + i * RECORD.size)
        images.append(Image(kernel, kind, capability, bool(exact), file[offset : offset + size]))
    return images


def listed_images(path: Path) -> list[Image] | None:
    """The images of a code file without their code; None if the file is cut off or of another version.

    Raises OSError.
    """
    with path.open("rb") as file:
        header = file.read(HEADER.size)
        if len(header) < HEADER.size:
            return None
        magic, version, _, count, _, _ = HEADER.unpack(header)
        if (magic, version) != (MAGIC, VERSION) or count * RECORD.size > path.stat().st_size:
            return None
        table = file.read(count * RECORD.size)
    if len(table) < count * RECORD.size:
        return None
    return [
        Image(kernel, kind, capability, bool(exact), b"")
        for kernel, kind, capability, exact, _, _ in RECORD.iter_unpack(table)
    ]
