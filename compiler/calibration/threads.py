"""Multithreaded work whose results do not depend on the number of threads."""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch

_T = TypeVar("_T")
_R = TypeVar("_R")
_OPENBLAS = re.compile(r"/\S*openblas\S*\.so\S*")
_NAMES = ("scipy_openblas_{}_num_threads64_", "openblas_{}_num_threads64_", "openblas_{}_num_threads")


class Workers:
    """Threads that work independently: pieces of fixed size give the same bits on any thread."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self._pool = pool

    def map(self, work: Callable[[_T], _R], items: Iterable[_T]) -> list[_R]:
        """Results in the order of the items."""
        return list(self._pool.map(work, items))


@contextmanager
def workers(jobs: int) -> Iterator[Workers]:
    """jobs: threads; 0 for one per CPU. Within the context torch and numpy use no threads of their own."""
    count = jobs or len(os.sched_getaffinity(0))
    of_torch = torch.get_num_threads()
    blas = _openblas()
    of_blas = [getter() for getter, _ in blas]
    torch.set_num_threads(1)
    for _, setter in blas:
        setter(1)
    try:
        with ThreadPoolExecutor(count, initializer=torch.set_num_threads, initargs=(1,)) as pool, torch.no_grad():
            yield Workers(pool)
    finally:
        torch.set_num_threads(of_torch)
        for (_, setter), before in zip(blas, of_blas, strict=True):
            setter(before)


def _openblas() -> list[tuple[Any, Any]]:
    """(get, set) functions for the thread count of numpy's BLAS, if it is OpenBLAS."""
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:
        return []
    found = []
    for path in sorted(set(_OPENBLAS.findall(maps))):
        library = ctypes.CDLL(path)
        for name in _NAMES:
            getter, setter = (getattr(library, name.format(verb), None) for verb in ("get", "set"))
            if getter is not None and setter is not None:
                found.append((getter, setter))
                break
    return found
