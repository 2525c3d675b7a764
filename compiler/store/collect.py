"""Garbage collection of the cache, entries and artifacts alike: least recently used first."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial

from llmc.compiler.store.cache import GraphCache
from llmc.compiler.store.cached_artifacts import cached_artifacts, drop_leftovers, remove_artifact


@dataclass(frozen=True)
class GcReport:
    """Keys removed (in a dry run: to be removed), bytes freed, entries and bytes left; artifacts are included."""

    removed: tuple[str, ...]
    freed_bytes: int
    kept: int
    kept_bytes: int


def collect(
    cache: GraphCache, max_size: int | None = None, older_than: float | None = None, dry_run: bool = False
) -> GcReport:
    """Removes entries unused for `older_than` seconds, then the least recently used until `max_size` bytes remain.

    Also removes leftovers of interrupted writers. With `dry_run` it only reports.
    """
    if not dry_run:
        cache.drop_stale_temporaries()
        drop_leftovers(cache.root)
    artifacts = cached_artifacts(cache.root)
    found = cache.removable()
    found += [(a.last_used, a.key, a.file_bytes, partial(remove_artifact, a)) for a in artifacts]
    left_bytes, left, now = sum(size for _, _, size, _ in found), len(found), time.time()
    removed, freed = [], 0
    for last_used, key, size, remove in sorted(found, key=lambda item: item[:2]):
        too_old = older_than is not None and now - last_used > older_than
        too_much = max_size is not None and left_bytes > max_size
        if not too_old and not too_much:
            continue
        if dry_run or remove():
            removed.append(key)
            freed += size
            left_bytes -= size
            left -= 1
    return GcReport(tuple(removed), freed, left, left_bytes)
