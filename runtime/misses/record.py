"""Writes bucket misses of a running engine to a record for `llmc buckets misses`."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from llmc.buckets.bucket import BucketError
from llmc.buckets.misses import HEADER, Miss, append_misses

if TYPE_CHECKING:
    from llmc.runtime.binding import GraphInfo
    from llmc.runtime.binding.statistics import BucketMiss

log = logging.getLogger("llmc.misses")


class MissRecorder:
    """Appends to a record. Misses are lost while it cannot be written, with one warning until it can.

    graphs: returns the engine's graphs by index, on each call, since their number may grow.
    """

    def __init__(self, path: Path, graphs: Callable[[], Sequence[GraphInfo]], block_size: int) -> None:
        self._path, self._graphs, self._block_size = path, graphs, block_size
        self._warned = False

    def take(self, misses: Sequence[BucketMiss]) -> None:
        """Appends misses, or warns."""
        graphs = self._graphs()
        try:
            append_misses(self._path, [to_miss(miss, graphs, self._block_size) for miss in misses])
            self._warned = False
        except BucketError as error:
            if not self._warned:
                log.warning("%s; misses are not recorded until it can be written", error)
            self._warned = True


def to_miss(miss: BucketMiss, graphs: Sequence[GraphInfo], block_size: int) -> Miss:
    """A line of the record, dated now."""
    graph = None if miss.graph is None else graphs[miss.graph]
    bucket = None if graph is None else graph.bucket
    context = miss.num_blocks * block_size
    return Miss(time.time(), miss.phase, miss.num_seqs, miss.num_tokens, context, bucket, miss.count)


def prepare_record(path: Path) -> None:
    """Prepares a record for appending: removes a line cut off by a crash.

    Raises BucketError if the file is not a record, or not writable.
    """
    try:
        if path.exists() and not path.is_file():
            raise BucketError(f"{path} is not a regular file: name another file")
        with path.open("ab+") as file:
            file.seek(0)
            first = file.readline(1 << 12)
            if first and _is_other(first):
                raise BucketError(f"{path} exists and is not a record of misses: name another file")
            file.seek(0)
            content = file.read()
            if not content.endswith(b"\n"):
                file.truncate(content.rfind(b"\n") + 1)
    except OSError as error:
        raise BucketError(f"cannot write the record of misses {path}: {error.strerror or error}") from error


def _is_other(line: bytes) -> bool:
    try:
        return bool(json.loads(line) != HEADER)
    except ValueError:
        # The very first write was cut off.
        return not json.dumps(HEADER).encode().startswith(line)
