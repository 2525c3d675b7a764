"""Mapped files: pages that were read count as process memory until released."""

from __future__ import annotations

import mmap


def release(mapped: mmap.mmap) -> None:
    """Releases the pages of a read-only mapping; they are mapped again on the next read."""
    if hasattr(mmap, "MADV_DONTNEED"):
        mapped.madvise(mmap.MADV_DONTNEED)
