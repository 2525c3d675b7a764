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


class Parser(Protocol):
    """Turns the numbered, non-empty lines of a file into requests; raises TraceError naming file and line."""

    prefix_block: int

    def requests(self, lines: Iterable[tuple[int, str]]) -> Iterator[Request]: ...


def parser_for(first_line: str, path: Path) -> Parser:
    """The parser of the form that the first line shows. Raises TraceError when it is of none."""
    if tuple(column.strip() for column in first_line.lstrip("\ufeff").split(",")) == _AZURE_COLUMNS:
        return _Azure(path)
    if first_line.startswith("{"):
        first = _json_object(first_line, f"{path}:1")
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
            where = f"{self._path}:{number}"
            row = _fields(line, where, ("arrival_s", "prompt_tokens", "output_tokens"), ("prefix_ids",))
            yield checked(
                where, row["arrival_s"], row["prompt_tokens"], row["output_tokens"], row.get("prefix_ids", ())
            )


class _Mooncake:
    prefix_block = 512

    def __init__(self, path: Path) -> None:
        self._path = path

    def requests(self, lines: Iterable[tuple[int, str]]) -> Iterator[Request]:
        for number, line in lines:
            where = f"{self._path}:{number}"
            row = _fields(line, where, ("timestamp", "input_length", "output_length"), ("hash_ids",))
            time = row["timestamp"]
            if isinstance(time, (int, float)) and not isinstance(time, bool) and abs(time) < 1e15:
                time = time / 1000
            yield checked(where, time, row["input_length"], row["output_length"], row.get("hash_ids", ()))


class _Azure:
    prefix_block = DEFAULT_PREFIX_BLOCK

    def __init__(self, path: Path) -> None:
        self._path = path

    def requests(self, lines: Iterable[tuple[int, str]]) -> Iterator[Request]:
        for position, (number, line) in enumerate(lines):
            if position == 0:
                continue
            where = f"{self._path}:{number}"
            cells = line.split(",")
            if len(cells) != len(_AZURE_COLUMNS):
                raise TraceError(f"{where}: {line[:60]!r} has {len(cells)} columns, not {len(_AZURE_COLUMNS)}")
            try:
                time = datetime.fromisoformat(cells[0].strip())
                seconds = (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp()
            except (ValueError, OverflowError):
                raise TraceError(f"{where}: {cells[0][:40]!r} is not a date and time") from None
            yield checked(where, seconds, _whole(cells[1]), _whole(cells[2]))


def _whole(cell: str) -> int | str:
    cell = cell.strip()
    return int(cell) if len(cell) <= 18 and cell.isascii() and cell.isdigit() else cell


def _json_object(line: str, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise TraceError(f"{where}: {line[:60]!r} is not JSON: {str(error)[:80]}") from None
    if not isinstance(row, dict):
        raise TraceError(f"{where}: {line[:60]!r} is not a JSON object")
    return row


def _fields(line: str, where: str, required: tuple[str, ...], optional: tuple[str, ...]) -> dict[str, Any]:
    row = _json_object(line, where)
    for name in required:
        if name not in row:
            raise TraceError(f"{where}: {name} is missing in {line[:60]!r}")
    unknown = next((name for name in row if name not in required and name not in optional), None)
    if unknown is not None:
        raise TraceError(f"{where}: unknown field {unknown[:40]!r}: a trace holds {', '.join((*required, *optional))}")
    return row
