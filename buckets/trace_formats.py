"""Trace file formats: llmc's own, and the published ones of Azure and Mooncake.

- Azure LLM inference traces (https://github.com/Azure/AzurePublicDataset, AzureLLMInferenceDataset2023.md): CSV with
  the columns TIMESTAMP, ContextTokens, GeneratedTokens; a timestamp without a zone is taken as UTC.
- Mooncake traces (https://github.com/kvcache-ai/Mooncake, FAST25-release): JSONL with timestamp (milliseconds),
  input_length, output_length, hash_ids (blocks of 512 tokens).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from operator import itemgetter
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from llmc.shown import shown

from .bucket import MAX_DIM
from .trace_lines import DEFAULT_PREFIX_BLOCK, Columns, Request, checked, checked_columns
from .trace_text import Batch, TraceError

_AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_OWN_FIELDS, _OWN_PREFIX = ("arrival_s", "prompt_tokens", "output_tokens"), "prefix_ids"
_MOONCAKE_FIELDS, _MOONCAKE_PREFIX = ("timestamp", "input_length", "output_length"), "hash_ids"

# Patterns of lines as the published traces have them, parsed in bulk: times of one century in UTC without a zone, and
# prefixes that are skipped.
_NUMBER = r"(0|[1-9]\d{0,8})"
_PLAIN_AZURE = re.compile(
    rf"^(20\d\d-\d\d-\d\d[ T]\d\d:\d\d:\d\d(?:\.\d{{1,9}})?),{_NUMBER},{_NUMBER}$", re.ASCII | re.MULTILINE
)
_PLAIN_MOONCAKE = re.compile(
    rf'^\{{"timestamp": ?(0|[1-9]\d{{0,14}}), ?"input_length": ?{_NUMBER}, ?"output_length": ?{_NUMBER}'
    r'(?:, ?"hash_ids": ?\[[^\]]*\])?\}$',
    re.ASCII | re.MULTILINE,
)

Lines = Sequence[tuple[int, str]]


class Parser(Protocol):
    """Turns numbered, non-empty lines of a file, without its header, into requests."""

    prefix_block: int
    has_header: bool

    def columns(self, batch: Batch) -> Columns | None:
        """Parses many lines at once; None if one may be invalid, or there are none."""
        ...

    def requests(self, lines: Lines) -> Iterator[Request]:
        """Parses line by line. Raises TraceError naming file and line."""
        ...


def parser_for(first_line: str, path: Path, *, prefixes: bool = True) -> Parser:
    """The parser of the format that the first line shows. prefixes: whether to read them.

    Raises TraceError for an unknown format.
    """
    if tuple(column.strip() for column in first_line.split(",")) == _AZURE_COLUMNS:
        return _Azure(path)
    if first_line.startswith("{"):
        first = _json_object(first_line, path, 1)
        if "llmc_trace" in first or "arrival_s" in first:
            return _Own(path, first)
        if "timestamp" in first and "input_length" in first:
            return _Mooncake(path, prefixes)
    raise TraceError(
        f"trace {path} is of no known form: its first line is neither llmc's JSONL, Azure's CSV header "
        f"({','.join(_AZURE_COLUMNS)}) nor Mooncake's JSONL"
    )


class _Own:
    def __init__(self, path: Path, first: dict[str, Any]) -> None:
        self._path = path
        self.has_header = "llmc_trace" in first
        if self.has_header and first["llmc_trace"] != 1:
            raise TraceError(f"trace {path} is of version {shown(first['llmc_trace'])}: this llmc reads version 1")
        block = first.get("prefix_block", DEFAULT_PREFIX_BLOCK) if self.has_header else DEFAULT_PREFIX_BLOCK
        if isinstance(block, bool) or not isinstance(block, int) or not 1 <= block <= MAX_DIM:
            raise TraceError(f"trace {path} has prefix_block {shown(block)}: use a whole number from 1 to {MAX_DIM}")
        self.prefix_block = block

    def columns(self, batch: Batch) -> Columns | None:
        values = _json_columns(batch, _OWN_FIELDS, _OWN_PREFIX)
        return checked_columns(*values) if values else None

    def requests(self, lines: Lines) -> Iterator[Request]:
        for number, line in lines:
            row = _fields(line, self._path, number, _OWN_FIELDS, _OWN_PREFIX)
            arrival_s, prompt, output = row["arrival_s"], row["prompt_tokens"], row["output_tokens"]
            yield checked(self._path, number, arrival_s, prompt, output, row.get(_OWN_PREFIX, ()))


class _Mooncake:
    prefix_block = 512
    has_header = False

    def __init__(self, path: Path, prefixes: bool) -> None:
        self._path, self._prefixes = path, prefixes

    def columns(self, batch: Batch) -> Columns | None:
        if not self._prefixes and (plain := _plain_columns(_PLAIN_MOONCAKE, batch)):
            milliseconds, prompts, outputs = (list(map(int, column)) for column in plain)
            return checked_columns([time / 1000 for time in milliseconds], prompts, outputs)
        values = _json_columns(batch, _MOONCAKE_FIELDS, _MOONCAKE_PREFIX)
        if values is None or not set(map(type, values[0])) <= {int, float}:
            return None
        times, *others = values
        if max(map(abs, times)) >= 1e15:
            return None
        return checked_columns([time / 1000 for time in times], *others)

    def requests(self, lines: Lines) -> Iterator[Request]:
        for number, line in lines:
            row = _fields(line, self._path, number, _MOONCAKE_FIELDS, _MOONCAKE_PREFIX)
            time = row["timestamp"]
            # A value that is no time is kept for the error.
            if (type(time) is int or type(time) is float) and abs(time) < 1e15:
                time /= 1000
            prefix = row.get(_MOONCAKE_PREFIX, ())
            yield checked(self._path, number, time, row["input_length"], row["output_length"], prefix)


class _Azure:
    prefix_block = DEFAULT_PREFIX_BLOCK
    has_header = True

    def __init__(self, path: Path) -> None:
        self._path = path

    def columns(self, batch: Batch) -> Columns | None:
        try:
            if plain := _plain_columns(_PLAIN_AZURE, batch):
                instants = np.array(plain[0], "datetime64[ns]").astype("datetime64[us]").astype(np.int64)
                return checked_columns((instants / 1e6).tolist(), *(list(map(int, column)) for column in plain[1:]))
            cells = [line.split(",") for _, line in batch.numbered()]
            if set(map(len, cells)) != {len(_AZURE_COLUMNS)}:
                return None
            times = [_seconds(row[0]) for row in cells]
        except (ValueError, OverflowError):
            return None
        return checked_columns(times, [_whole(row[1]) for row in cells], [_whole(row[2]) for row in cells])

    def requests(self, lines: Lines) -> Iterator[Request]:
        for number, line in lines:
            cells = line.split(",")
            if len(cells) != len(_AZURE_COLUMNS):
                raise TraceError(
                    f"{self._path}:{number}: {line[:60]!r} has {len(cells)} columns, not {len(_AZURE_COLUMNS)}"
                )
            try:
                seconds = _seconds(cells[0])
            except (ValueError, OverflowError):
                raise TraceError(f"{self._path}:{number}: {cells[0][:40]!r} is not a date and time") from None
            yield checked(self._path, number, seconds, _whole(cells[1]), _whole(cells[2]))


def _seconds(cell: str) -> float:
    """Raises ValueError or OverflowError."""
    time = datetime.fromisoformat(cell.strip())
    return (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp()


def _whole(cell: str) -> int | str:
    cell = cell.strip()
    return int(cell) if len(cell) <= 18 and cell.isascii() and cell.isdigit() else cell


def _json_object(line: str, path: Path, number: int) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise TraceError(f"{path}:{number}: {line[:60]!r} is not JSON: {str(error)[:80]}") from None
    if not isinstance(row, dict):
        raise TraceError(f"{path}:{number}: {line[:60]!r} is not a JSON object")
    return row


def _plain_columns(form: re.Pattern[str], batch: Batch) -> tuple[tuple[str, ...], ...] | None:
    """The groups that `form` matches in the lines; None unless every line matches."""
    rows = form.findall("".join(batch.raw))
    return tuple(zip(*rows, strict=True)) if len(rows) == len(batch.raw) else None


def _json_columns(batch: Batch, fields: tuple[str, ...], prefix: str) -> tuple[Sequence[Any], ...] | None:
    """The values of the three fields, and of `prefix` if present; None unless every line is such an object."""
    texts = [line for _, line in batch.numbered()]
    text = ",".join(texts)
    # With one brace per line, at its start, equal counts of objects and lines mean one object per line.
    if text.count("{") != len(texts) or set(map(itemgetter(0), texts)) != {"{"}:
        return None
    try:
        rows = json.loads(f"[{text}]")
        sizes = set(map(len, rows))
        if len(rows) != len(texts):
            return None
        columns = tuple([row[field] for row in rows] for field in fields)
    except (ValueError, RecursionError, LookupError, TypeError):
        return None
    if sizes == {len(fields)}:
        return columns
    if any(len(row) != len(fields) + (prefix in row) for row in rows):
        return None
    return *columns, [row.get(prefix, ()) for row in rows]


def _fields(line: str, path: Path, number: int, fields: tuple[str, ...], optional: str) -> dict[str, Any]:
    row, required = _json_object(line, path, number), frozenset(fields)
    given = row.keys()
    if given == required or (required <= given and given - required == {optional}):
        return row
    missing = sorted(required - given)
    if missing:
        raise TraceError(f"{path}:{number}: {missing[0]} is missing in {line[:60]!r}")
    unknown = next(name for name in row if name not in required and name != optional)
    allowed = ", ".join((*sorted(required), optional))
    raise TraceError(f"{path}:{number}: unknown field {unknown[:40]!r}: a trace holds {allowed}")
