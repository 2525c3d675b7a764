"""The forms of trace files: llmc's own, and the published ones of Azure and Mooncake.

- Azure LLM inference traces (https://github.com/Azure/AzurePublicDataset, AzureLLMInferenceDataset2023.md): CSV with
  the columns TIMESTAMP, ContextTokens, GeneratedTokens; a timestamp without a zone is taken as UTC.
- Mooncake traces (https://github.com/kvcache-ai/Mooncake, FAST25-release): JSONL with timestamp (milliseconds),
  input_length, output_length, hash_ids (blocks of 512 tokens).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

from .bucket import MAX_DIM
from .trace import DEFAULT_PREFIX_BLOCK, Request, TraceError, checked

_AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_OWN_FIELDS, _OWN_PREFIX = frozenset({"arrival_s", "prompt_tokens", "output_tokens"}), "prefix_ids"
_MOONCAKE_FIELDS, _MOONCAKE_PREFIX = frozenset({"timestamp", "input_length", "output_length"}), "hash_ids"


class Parser(Protocol):
    """Turns the numbered, non-empty lines of a file into requests; raises TraceError naming file and line."""

    prefix_block: int

    def requests(self, lines: Iterable[tuple[int, str]]) -> Iterator[Request]: ...


def parser_for(first_line: str, path: Path) -> Parser:
    """The parser of the form that the first line shows. Raises TraceError when it is of none."""
    if tuple(column.strip() for column in first_line.lstrip("\ufeff").split(",")) == _AZURE_COLUMNS:
        return _Azure(path)
    if first_line.startswith("{"):
        first = _json_object(first_line, path, 1)
        if "llmc_trace" in first or "arrival_s" in first:
            return _Own(path, first)
        if "timestamp" in first and "input_length" in first:
            return _Mooncake(path)
    raise TraceError(
        f"trace {path} is of no known form: its first line is neither llmc's JSONL, Azure's CSV header "
        f"({','.join(_AZURE_COLUMNS)}) nor Mooncake's JSONL"
    )


class _Own:
    def __init__(self, path: Path, first: dict[str, Any]) -> None:
        self._path = path
        self._has_header = "llmc_trace" in first
        if self._has_header and first["llmc_trace"] != 1:
            raise TraceError(f"trace {path} is of version {first['llmc_trace']!r}: this llmc reads version 1")
        block = first.get("prefix_block", DEFAULT_PREFIX_BLOCK) if self._has_header else DEFAULT_PREFIX_BLOCK
        if isinstance(block, bool) or not isinstance(block, int) or not 1 <= block <= MAX_DIM:
            raise TraceError(f"trace {path} has prefix_block {block!r}: use a whole number from 1 to {MAX_DIM}")
        self.prefix_block = block

    def requests(self, lines: Iterable[tuple[int, str]]) -> Iterator[Request]:
        for position, (number, line) in enumerate(lines):
            if position == 0 and self._has_header:
                continue
            row = _fields(line, self._path, number, _OWN_FIELDS, _OWN_PREFIX)
            arrival_s, prompt, output = row["arrival_s"], row["prompt_tokens"], row["output_tokens"]
            yield checked(self._path, number, arrival_s, prompt, output, row.get(_OWN_PREFIX, ()))


class _Mooncake:
    prefix_block = 512

    def __init__(self, path: Path) -> None:
        self._path = path

    def requests(self, lines: Iterable[tuple[int, str]]) -> Iterator[Request]:
        for number, line in lines:
            row = _fields(line, self._path, number, _MOONCAKE_FIELDS, _MOONCAKE_PREFIX)
            time = row["timestamp"]
            # What is no time stays as it is, for the complaint.
            if (type(time) is int or type(time) is float) and abs(time) < 1e15:
                time /= 1000
            prefix = row.get(_MOONCAKE_PREFIX, ())
            yield checked(self._path, number, time, row["input_length"], row["output_length"], prefix)


class _Azure:
    prefix_block = DEFAULT_PREFIX_BLOCK

    def __init__(self, path: Path) -> None:
        self._path = path

    def requests(self, lines: Iterable[tuple[int, str]]) -> Iterator[Request]:
        for position, (number, line) in enumerate(lines):
            if position == 0:
                continue
            cells = line.split(",")
            if len(cells) != len(_AZURE_COLUMNS):
                raise TraceError(
                    f"{self._path}:{number}: {line[:60]!r} has {len(cells)} columns, not {len(_AZURE_COLUMNS)}"
                )
            try:
                time = datetime.fromisoformat(cells[0].strip())
                seconds = (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp()
            except (ValueError, OverflowError):
                raise TraceError(f"{self._path}:{number}: {cells[0][:40]!r} is not a date and time") from None
            yield checked(self._path, number, seconds, _whole(cells[1]), _whole(cells[2]))


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


def _fields(line: str, path: Path, number: int, required: frozenset[str], optional: str) -> dict[str, Any]:
    row = _json_object(line, path, number)
    given = row.keys()
    if given == required or (required <= given and given - required == {optional}):
        return row
    missing = sorted(required - given)
    if missing:
        raise TraceError(f"{path}:{number}: {missing[0]} is missing in {line[:60]!r}")
    unknown = next(name for name in row if name not in required and name != optional)
    allowed = ", ".join((*sorted(required), optional))
    raise TraceError(f"{path}:{number}: unknown field {unknown[:40]!r}: a trace holds {allowed}")
