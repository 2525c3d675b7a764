"""Memory behind a cache of a few pages, which counts how often a kernel fetches each page (`page_watch.c`)."""

from __future__ import annotations

import ctypes
import mmap
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

PAGE_BYTES = 4096
_SOURCE = Path(__file__).with_suffix(".c")


def built(folder: Path) -> ctypes.CDLL:
    """The C side, built in a folder."""
    library = folder / "page_watch.so"
    subprocess.run(["cc", "-O1", "-shared", "-fPIC", "-o", library, _SOURCE], check=True)
    return ctypes.CDLL(str(library))


class WatchedArrays:
    """Copies of arrays, each from a page's start on. fetches: how often each page was fetched, by array."""

    def __init__(self, library: ctypes.CDLL, arrays: Mapping[str, NDArray[Any]]) -> None:
        self._library = library
        pages = {name: -(-array.nbytes // PAGE_BYTES) for name, array in arrays.items()}
        total = sum(pages.values())
        self._memory = np.frombuffer(mmap.mmap(-1, total * PAGE_BYTES), np.uint8)
        self._counts = np.zeros(total, np.uint32)
        self.addresses: dict[str, int] = {}
        self.fetches: dict[str, NDArray[np.uint32]] = {}
        first = 0
        for name, array in arrays.items():
            begin = first * PAGE_BYTES
            self._memory[begin : begin + array.nbytes] = array.reshape(-1).view(np.uint8)
            self.addresses[name] = self._memory.ctypes.data + begin
            self.fetches[name] = self._counts[first : first + pages[name]]
            first += pages[name]

    @contextmanager
    def watched(self, pages: int) -> Iterator[None]:
        """Counts anew, for a cache of `pages` pages; inside the block nothing but a kernel may touch the arrays."""
        self._counts[:] = 0
        first = ctypes.c_void_p(self._memory.ctypes.data)
        counts = ctypes.c_void_p(self._counts.ctypes.data)
        if self._library.watch_pages(first, ctypes.c_size_t(len(self._counts)), counts, ctypes.c_size_t(pages)):
            raise OSError("reads of memory cannot be watched")
        try:
            yield
        finally:
            self._library.unwatch_pages()

    def forget(self) -> None:
        """Empties the cache."""
        self._library.forget_pages()
