"""The output file of `llmc run`: lines in input order, durable as they come, resumable."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

from .prompts import Prompt


class ResultsError(RuntimeError):
    """An output file that cannot be written or resumed; the message is one sentence."""


class ResultsFile:
    """Writes one JSON line a prompt to `path`, in input order.

    The file always holds the results 0 … k-1. A result that finishes before its predecessors goes to a side file
    (`path` + ".partial") until they are there; the side file is removed when all are. Every line is fsynced before
    `add` returns. With resume, both files are read, checked against the prompts, and continued; a line that an
    interruption tore is dropped. Raises ResultsError.
    """

    def __init__(self, path: Path, prompts: Sequence[Prompt], *, resume: bool = False, overwrite: bool = False) -> None:
        self.path = path
        self.partial_path = path.with_name(path.name + ".partial")
        self._prompts = prompts
        self._waiting: dict[int, dict[str, Any]] = {}
        self._next = 0
        self._partial: TextIO | None = None
        self._file: TextIO | None = None
        exists = any(file.exists() and file.stat().st_size > 0 for file in (path, self.partial_path))
        if exists and not resume and not overwrite:
            raise ResultsError(f"{path} exists: pass --resume to continue it or --overwrite to replace it")
        keep_bytes = self._read_existing() if exists and resume else 0
        if not resume:
            self.partial_path.unlink(missing_ok=True)
        try:
            self._file = path.open("r+" if path.exists() else "w", encoding="utf-8", newline="\n")
            self._file.truncate(keep_bytes)
            self._file.seek(0, os.SEEK_END)
        except OSError as error:
            raise ResultsError(f"cannot write {path}: {error.strerror or error}") from error
        self._advance()

    @property
    def finished(self) -> frozenset[int]:
        """Indices that need not run again."""
        return frozenset(range(self._next)) | frozenset(self._waiting)

    def add(self, record: dict[str, Any]) -> None:
        """Stores the result of prompt record["index"]. Raises ResultsError when the disk does not take it."""
        self._waiting[record["index"]] = record
        try:
            if record["index"] != self._next:
                if self._partial is None:
                    self._partial = self.partial_path.open("a", encoding="utf-8", newline="\n")
                _append(self._partial, record)
            self._advance()
        except OSError as error:
            raise ResultsError(f"cannot write {self.path}: {error.strerror or error}") from error

    def close(self) -> None:
        """Closes the files; the side file goes when nothing waits in it."""
        for file in (self._file, self._partial):
            if file is not None:
                file.close()
        if not self._waiting:
            self.partial_path.unlink(missing_ok=True)

    def _advance(self) -> None:
        assert self._file is not None
        while (record := self._waiting.get(self._next)) is not None:
            _append(self._file, record)
            del self._waiting[self._next]
            self._next += 1

    def _read_existing(self) -> int:
        """Takes over what the files hold; returns the bytes of `path` that are whole lines."""
        keep_bytes = 0
        for record, end in _read_lines(self.path):
            self._check(record, self.path)
            if record["index"] != self._next:
                raise ResultsError(
                    f"{self.path} has index {record['index']} where {self._next} belongs: it was not written by "
                    "llmc run, pass --overwrite to replace it"
                )
            self._next += 1
            keep_bytes = end
        for record, _ in _read_lines(self.partial_path):
            self._check(record, self.partial_path)
            if record["index"] >= self._next:
                self._waiting[record["index"]] = record
        # Rewritten without a torn last line, so that appending stays safe.
        if self.partial_path.exists():
            side = self.partial_path.with_name(self.partial_path.name + ".new")
            with side.open("w", encoding="utf-8", newline="\n") as file:
                for record in self._waiting.values():
                    _append(file, record)
            os.replace(side, self.partial_path)
        return keep_bytes

    def _check(self, record: dict[str, Any], path: Path) -> None:
        index = record.get("index")
        if isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < len(self._prompts):
            raise ResultsError(
                f"{path} has index {index!r} and there are {len(self._prompts)} prompts: resume with the same prompts, "
                "or pass --overwrite"
            )
        expected = self._prompts[index].as_record()
        if any(record.get(key) != value for key, value in expected.items()):
            raise ResultsError(
                f"{path} belongs to other prompts, number {index} differs: resume with the same prompts, or pass "
                "--overwrite"
            )


def _append(file: TextIO, record: dict[str, Any]) -> None:
    file.write(json.dumps(record, ensure_ascii=False) + "\n")
    file.flush()
    os.fsync(file.fileno())


def _read_lines(path: Path) -> list[tuple[dict[str, Any], int]]:
    """(record, byte where its line ends) for every whole line; a torn last line is left out."""
    if not path.exists():
        return []
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ResultsError(f"cannot read {path}: {error.strerror or error}") from error
    records, end = [], 0
    for number, line in enumerate(data.split(b"\n")[:-1], start=1):
        end += len(line) + 1
        try:
            record = json.loads(line)
        except ValueError as error:
            if end == len(data):
                break
            raise ResultsError(f"{path} line {number} is not valid JSON: pass --overwrite to replace it") from error
        if not isinstance(record, dict):
            raise ResultsError(f"{path} line {number} is not a result: pass --overwrite to replace it")
        records.append((record, end))
    return records
