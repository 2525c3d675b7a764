"""How a linear kernel walks its operands: choices that change its speed on a machine, but no bit of its results."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace

_MAX_STREAMS = 16
_MAX_CHUNK_ROWS = 1024  # their sums are on the stack
_LEAST_BLOCK_BYTES = 4 << 10
_LEAST_CHUNK_ROWS = 32


@dataclass(frozen=True)
class Schedule:
    """streams: panels that one row, or a row tile of exact sums, reads side by side or in turn. ahead_bytes: distance
    of prefetches in a stream. block_bytes: part of a panel that stays in cache while row tiles pass. chunk_rows: rows
    that share one pass over the panels."""

    streams: int
    ahead_bytes: int
    block_bytes: int
    chunk_rows: int

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if type(value) is not int or value < 1:
                raise ValueError(f"{name} of a schedule is {value!r}: use 1 or more")

    def text(self) -> str:
        """Canonical JSON, for keys and files."""
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def parse(cls, text: str) -> Schedule:
        """Reads `text()`. Raises ValueError."""
        try:
            return cls(**json.loads(text))
        except (TypeError, json.JSONDecodeError) as error:
            raise ValueError(f"{text!r} is not a schedule: {error}") from None


def neighbours(schedule: Schedule, row_tile: int, largest_tile: int) -> Iterator[tuple[str, Schedule]]:
    """(name of the changed number, schedule) for schedules that differ from `schedule` in one number, if it matters to
    a kernel with that row tile. One row streams, two may prefetch ahead; only the largest tile passes over blocks in
    chunks of rows."""
    numbers: dict[str, tuple[int, ...]] = {}
    if row_tile == 1:
        streams = schedule.streams
        numbers["streams"] = (streams // 2, streams * 3 // 4, streams * 3 // 2, min(streams * 2, _MAX_STREAMS))
    if row_tile <= 2:
        numbers["ahead_bytes"] = (schedule.ahead_bytes // 2, schedule.ahead_bytes * 2)
    if row_tile == largest_tile:
        half, rows = schedule.block_bytes // 2, schedule.chunk_rows
        numbers["block_bytes"] = (max(half, _LEAST_BLOCK_BYTES), schedule.block_bytes * 2)
        numbers["chunk_rows"] = (max(rows // 2, _LEAST_CHUNK_ROWS), min(rows * 2, _MAX_CHUNK_ROWS))
    for name, values in numbers.items():
        for value in sorted(set(values)):
            if value >= 1 and value != getattr(schedule, name):
                yield name, replace(schedule, **{name: value})
