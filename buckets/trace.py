"""Traces: arrival times and lengths of requests, without their content.

llmc's own format is JSONL, one request per line, after an optional header line:

    {"llmc_trace": 1, "prefix_block": 512}
    {"arrival_s": 0.0, "prompt_tokens": 374, "output_tokens": 44, "prefix_ids": [0, 1]}

arrival_s counts from any zero. prefix_ids (optional) name the prompt's leading blocks of prefix_block tokens; equal ids
mean equal blocks. `llmc.buckets.trace_formats` reads published formats.
"""

from __future__ import annotations

import gc
import json
from array import array
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from .trace_formats import parser_for
from .trace_lines import DEFAULT_PREFIX_BLOCK, Columns, Request
from .trace_text import TraceError, name_of, opened

_NO_PREFIX_START, _NO_PREFIX_IDS = np.zeros(1, np.int64), np.zeros(0, np.int64)


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in order of arrival, as columns.

    arrival_s float64 [N], starting at 0. prompt_tokens, output_tokens int64 [N]. prefix_ids int64 [M]: those of request
    i are prefix_ids[prefix_start[i] : prefix_start[i + 1]]. prefix_block: tokens per prefix block.
    """

    name: str
    arrival_s: npt.NDArray[np.float64]
    prompt_tokens: npt.NDArray[np.int64]
    output_tokens: npt.NDArray[np.int64]
    prefix_start: npt.NDArray[np.int64] = field(default_factory=lambda: _NO_PREFIX_START)
    prefix_ids: npt.NDArray[np.int64] = field(default_factory=lambda: _NO_PREFIX_IDS)
    prefix_block: int = DEFAULT_PREFIX_BLOCK

    def __len__(self) -> int:
        return len(self.arrival_s)

    def first(self, count: int) -> Trace:
        """The first `count` requests."""
        return self.part(0, count)

    def part(self, start: int, stop: int) -> Trace:
        """Requests start … stop - 1; times count from the first of them, if any."""
        starts = self.prefix_start[start : stop + 1]
        if not len(starts):
            starts = np.zeros(1, np.int64)
        arrival_s = self.arrival_s[start:stop]
        return replace(
            self,
            arrival_s=arrival_s - arrival_s[:1].sum(),
            prompt_tokens=self.prompt_tokens[start:stop],
            output_tokens=self.output_tokens[start:stop],
            prefix_start=starts - starts[0],
            prefix_ids=self.prefix_ids[starts[0] : starts[-1]],
        )

    def rows(self, indices: npt.NDArray[np.int64]) -> Trace:
        """The requests at these indices, ascending; arrival times are kept."""
        ids = [self.prefix_of(index) for index in indices.tolist()]
        return replace(
            self,
            arrival_s=self.arrival_s[indices],
            prompt_tokens=self.prompt_tokens[indices],
            output_tokens=self.output_tokens[indices],
            prefix_start=np.cumsum([0, *map(len, ids)], dtype=np.int64),
            prefix_ids=np.concatenate([self.prefix_ids[:0], *ids]),
        )

    def prefix_of(self, index: int) -> npt.NDArray[np.int64]:
        """Prefix ids of one request, int64 [n]."""
        if len(self.prefix_start) <= index + 1:
            return self.prefix_ids[:0]
        return self.prefix_ids[self.prefix_start[index] : self.prefix_start[index + 1]]

    def cached_tokens(self) -> npt.NDArray[np.int64]:
        """Tokens of each prompt that an unbounded prefix cache would hold on arrival, at most prompt - 1: [N]."""
        cached = np.zeros(len(self), np.int64)
        if not len(self.prefix_ids):
            return cached
        seen: set[int] = set()
        ids, starts = self.prefix_ids.tolist(), self.prefix_start.tolist()
        for index in range(len(self)):
            mine = ids[starts[index] : starts[index + 1]]
            hits = next((n for n, block in enumerate(mine) if block not in seen), len(mine))
            seen.update(mine)
            cached[index] = hits * self.prefix_block
        return np.minimum(cached, self.prompt_tokens - 1)


def read_trace(path: Path, *, prefixes: bool = True) -> Trace:
    """Reads a trace of any known format, identified by its first line, some thousand lines at a time; `opened` defines
    the sources.

    prefixes: whether to read prefix ids, which take most of the time if there are any.
    Raises TraceError for a file that cannot be read, has no known format, is empty, or has a malformed line.
    """
    with opened(path) as batches, _no_collection():
        first = next((batch for batch in batches if batch.numbered()), None)
        if first is None:
            raise TraceError(f"trace {path} is empty: record some requests first")
        number, line = first.numbered()[0]
        parser = parser_for(line, path, prefixes=prefixes)
        rest = chain((first.behind(number) if parser.has_header else first,), batches)
        # Lines are examined one by one only if a batch has a fault, to name it.
        columns = (parser.columns(batch) or _columns_of(parser.requests(batch.numbered())) for batch in rest)
        trace = _joined(path, columns, parser.prefix_block)
        return trace if prefixes else replace(trace, prefix_start=_NO_PREFIX_START, prefix_ids=_NO_PREFIX_IDS)


@contextmanager
def _no_collection() -> Iterator[None]:
    """Suspends cyclic garbage collection: a million lines make no cycles, and collecting takes a fifth of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def collect(path: Path, requests: Iterable[Request], prefix_block: int = DEFAULT_PREFIX_BLOCK) -> Trace:
    """The requests as a Trace, sorted by arrival (stable). Raises TraceError if there are none."""
    return _joined(path, (_columns_of(requests),), prefix_block)


def _columns_of(requests: Iterable[Request]) -> Columns:
    rows = list(requests)
    return Columns(
        [row.arrival_s for row in rows],
        [row.prompt_tokens for row in rows],
        [row.output_tokens for row in rows],
        [len(row.prefix_ids) for row in rows],
        [block for row in rows for block in row.prefix_ids],
    )


def _joined(path: Path, batches: Iterable[Columns], prefix_block: int) -> Trace:
    arrivals, prompts, outputs = array("d"), array("q"), array("q")
    counts, ids = array("q"), array("q")
    for batch in batches:
        arrivals.extend(batch.arrival_s)
        for whole, part in zip((prompts, outputs, counts, ids), batch[1:], strict=True):
            whole.extend(part)
    if not arrivals:
        raise TraceError(f"trace {path} has no requests: record some first")
    arrival_s = np.array(arrivals, np.float64)
    order = np.argsort(arrival_s, kind="stable")
    starts = np.concatenate(([0], np.cumsum(np.array(counts, np.int64))))
    flat = np.array(ids, np.int64)
    if len(flat) and np.any(np.diff(order) < 0):
        flat = np.concatenate([flat[starts[i] : starts[i + 1]] for i in order])
    return Trace(
        name=name_of(path),
        arrival_s=arrival_s[order] - arrival_s[order[0]],
        prompt_tokens=np.array(prompts, np.int64)[order],
        output_tokens=np.array(outputs, np.int64)[order],
        prefix_start=np.concatenate(([0], np.cumsum(np.array(counts, np.int64)[order]))),
        prefix_ids=flat,
        prefix_block=prefix_block,
    )


def write_trace(path: Path, trace: Trace) -> None:
    """Writes llmc's JSONL format. Raises TraceError if the file cannot be written."""
    try:
        with path.open("w", encoding="utf-8") as out:
            out.write(json.dumps({"llmc_trace": 1, "prefix_block": trace.prefix_block}) + "\n")
            columns = zip(trace.arrival_s.tolist(), trace.prompt_tokens.tolist(), trace.output_tokens.tolist(),
                          strict=True)  # fmt: skip
            for index, (arrival, prompt, output) in enumerate(columns):
                row: dict[str, Any] = {"arrival_s": arrival, "prompt_tokens": prompt, "output_tokens": output}
                if prefix := trace.prefix_of(index).tolist():
                    row["prefix_ids"] = prefix
                out.write(json.dumps(row) + "\n")
    except OSError as error:
        raise TraceError(f"cannot write trace {path}: {error.strerror or error}") from error
