"""What a new artifact takes over from an existing one: packed weights, and files that are not llmc's."""

from __future__ import annotations

import fcntl
import os
import shutil
import zlib
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from llmc.compiler.store.weights import WeightLayout
from llmc.manifest import MAX_BYTES
from llmc.regular_file import parse_json, read_regular

_PIECE_BYTES = 4 << 20
_FICLONE = 0x40049409  # Linux: ioctl_ficlone(2)


def reuse_weights(
    previous: Path, crcs: Mapping[str, int] | None, layout: WeightLayout, packed: Path
) -> dict[str, int] | None:
    """Links the weights of the artifact about to be replaced, if they have the checksums `crcs` (by name).

    Returns the checksums, or None if nothing can be reused. The file itself is checked, so that compiling again repairs
    a damaged artifact.
    """
    weights = previous / "weights.safetensors"
    try:
        manifest = parse_json(read_regular(previous / "manifest.json", MAX_BYTES))
        if crcs is None or manifest.get("weights_crc32") != crcs or weights.stat().st_size != layout.total_bytes:
            return None
        if crcs != file_crcs(weights, layout):
            return None
        os.link(weights, packed)
    except (OSError, ValueError, AttributeError):
        return None
    return dict(crcs)


def file_crcs(path: Path, layout: WeightLayout) -> dict[str, int]:
    """CRC-32 of every weight in a packed file, read once, on all CPUs.

    Raises OSError if it cannot be read, ValueError if header or padding differ from the layout's.
    """
    starts = [w.file_offset for w in layout.weights]
    ends = [w.file_offset + w.nbytes for w in layout.weights]
    with path.open("rb") as file, ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:

        def read(begin: int, end: int) -> bytes:
            return os.pread(file.fileno(), end - begin, begin)

        def crc(begin: int, end: int) -> int:
            found = 0
            for at in range(begin, end, _PIECE_BYTES):
                found = zlib.crc32(read(at, min(at + _PIECE_BYTES, end)), found)
            return found

        padding = zip([len(layout.header), *ends], [*starts, layout.total_bytes], strict=True)
        if read(0, len(layout.header)) != layout.header or any(any(read(begin, end)) for begin, end in padding):
            raise ValueError(f"{path} does not have the planned layout")
        return dict(zip((w.name for w in layout.weights), pool.map(crc, starts, ends), strict=True))


def place(source: Path, target: Path) -> str:
    """Puts a large file into another directory, without copying if the file system allows. Returns "cloned", "linked"
    or "copied"."""
    try:
        with source.open("rb") as read, target.open("xb") as write:
            fcntl.ioctl(write.fileno(), _FICLONE, read.fileno())
        return "cloned"
    except OSError:
        target.unlink(missing_ok=True)
        try:
            os.link(source, target)
            return "linked"
        except OSError:
            shutil.copyfile(source, target)
            return "copied"


def copy_others(artifact: Path, staging: Path, but: Collection[str]) -> None:
    """Copies everything in an artifact except the names in `but`."""
    for one in artifact.iterdir():
        if one.name in but:
            continue
        if one.is_dir() and not one.is_symlink():
            shutil.copytree(one, staging / one.name, symlinks=True)
        else:
            shutil.copy2(one, staging / one.name, follow_symlinks=False)
