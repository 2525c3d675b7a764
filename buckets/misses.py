"""The record of bucket misses: steps that no bucket of the ladder held, and what served them instead.

JSON lines, appended while serving, one per shape and write:

    {"llmc_misses": 1}
    {"time": 1764000000.0, "phase": "decode", "batch": 9, "tokens": 9, "context": 700, "bucket": "decode:16x1024",
     "count": 3}

time: of the last such miss, in seconds since 1970. batch: sequences of the step; tokens: new tokens of all of them;
context: tokens in the KV cache of the longest after the step, rounded up to blocks. bucket: the one that served it;
null if it was split or failed. count: steps since the previous line of the same shape, so the total is the sum over
lines. Readers add up equal shapes, and skip a last line cut off by a crash.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from llmc.graphs_format import PHASES
from llmc.regular_file import JsonError, parse_json, read_text
from llmc.shown import shown

from .bucket import MAX_DIM, Bucket, BucketError

HEADER = {"llmc_misses": 1}
_FIELDS = ("time", "phase", "batch", "tokens", "context", "bucket", "count")
_MAX_FILE_BYTES = 1 << 28


@dataclass(frozen=True, slots=True)
class Miss:
    """One shape that missed, with the fields of the file. Raises BucketError for values out of range."""

    time: float
    phase: str
    batch: int
    tokens: int
    context: int
    bucket: Bucket | None = None
    count: int = 1

    def __post_init__(self) -> None:
        if self.phase not in PHASES:
            raise BucketError(f"a miss has the phase {shown(self.phase)}: use one of {', '.join(PHASES)}")
        for name in ("batch", "tokens", "context", "count"):
            value = getattr(self, name)
            limit = MAX_DIM if name != "count" else 1 << 62
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= limit:
                raise BucketError(f"a miss has {name} {str(value)[:40]!r}: use a whole number from 1 on")
        if isinstance(self.time, bool) or not isinstance(self.time, (int, float)) or not 0 <= self.time < 1e15:
            raise BucketError(f"a miss has the time {str(self.time)[:40]!r}: use seconds since 1970")

    @property
    def wanted(self) -> Bucket:
        """The bucket of exactly this shape."""
        seq = {"prefill": -(-self.tokens // self.batch), "decode": self.context, "mixed": self.tokens}[self.phase]
        return Bucket(self.phase, self.batch, seq)

    def line(self) -> str:
        """The line of the file, without its newline."""
        values = {name: getattr(self, name) for name in _FIELDS}
        return json.dumps(values | {"bucket": None if self.bucket is None else str(self.bucket)})


def append_misses(path: Path, misses: Iterable[Miss]) -> None:
    """Appends lines to the record, creating it if need be. Raises BucketError if it cannot be written."""
    text = "".join(miss.line() + "\n" for miss in misses)
    if not text:
        return
    try:
        with path.open("ab", buffering=0) as out:
            start = out.tell()
            # One write per call, so that lines of several writers do not mix.
            data = ((json.dumps(HEADER) + "\n" if start == 0 else "") + text).encode()
            if out.write(data) != len(data):  # no line may be appended to a part of one
                out.truncate(start)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except OSError as error:
        raise BucketError(f"cannot write the record of misses {path}: {error.strerror or error}") from error


def read_misses(path: Path) -> list[Miss]:
    """Equal shapes added up, most frequent first. Raises BucketError naming file and line."""
    try:
        lines = read_text(path, _MAX_FILE_BYTES).split("\n")
    except OSError as error:
        raise BucketError(f"cannot read the record of misses {path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise BucketError(f"record of misses {path} is not UTF-8 text: {error.reason} at byte {error.start}") from error
    misses = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = parse_json(line)
        except JsonError:
            if number == len(lines):
                break  # cut off: a complete line ends in a newline
            raise BucketError(f"{path}:{number}: {line[:60]!r} is not JSON") from None
        if row == HEADER:
            continue
        misses.append(_parse(row, f"{path}:{number}"))
    return merge_misses(misses)


def merge_misses(misses: Iterable[Miss]) -> list[Miss]:
    """Equal shapes added up, most frequent first."""
    total: dict[tuple[Any, ...], Miss] = {}
    for miss in misses:
        shape = (miss.phase, miss.batch, miss.tokens, miss.context, miss.bucket)
        if (old := total.get(shape)) is not None:
            miss = replace(miss, time=max(old.time, miss.time), count=old.count + miss.count)
        total[shape] = miss
    return sorted(total.values(), key=lambda miss: (-miss.count, miss.phase, miss.batch, miss.tokens, miss.context))


def _parse(row: Any, where: str) -> Miss:
    if not isinstance(row, dict) or row.keys() != set(_FIELDS):
        raise BucketError(f"{where}: {str(row)[:60]!r} is not a miss: give exactly {', '.join(_FIELDS)}")
    try:
        bucket = row["bucket"]
        if bucket is not None and not isinstance(bucket, str):
            raise BucketError(f"a miss has the bucket {str(bucket)[:40]!r}: use a name or null")
        return Miss(**(row | {"bucket": None if bucket is None else Bucket.parse(bucket)}))
    except BucketError as error:
        raise BucketError(f"{where}: {error}") from None
