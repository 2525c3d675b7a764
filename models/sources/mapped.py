"""Mapped files: a page that was read is memory of the process until it is given back."""

from __future__ import annotations

import mmap


def release(mapped: mmap.mmap) -> None:
    """Gives back the pages of a file mapped to be read; each is mapped again when it is read again."""
    if hasattr(mmap, "MADV_DONTNEED"):
        mapped.madvise(mmap.MADV_DONTNEED)
