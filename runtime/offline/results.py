"""The output file of `llmc run`: lines in input order, durable, resumable."""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from llmc.output_path import OutputError, check_outputs
from llmc.regular_file import read_regular
from llmc.replaced_file import write_replaced
from llmc.runtime.offline.identity import difference
from llmc.runtime.offline.prompts import Prompt


class ResultsError(RuntimeError):
    """An output file cannot be written or resumed; the message is one sentence."""


class ResultsFile:
    """Writes one JSON line per prompt to `path`, in input order, and `identity` beside it (`path` + ".run").

    The file always holds results 0 … k-1. A result that finishes before its predecessors waits in a side file (`path` +
    ".partial"), which is removed at the end. Every line is written before `add` returns, so a killed run keeps its
    finished results. It is synced to disk within a second. Files are unchanged until the first `add`.

    With resume, the files are checked against identity and prompts, and continued; a torn line and failed requests run
    again. Raises ResultsError.
    """

    def __init__(
        self,
        path: Path,
        prompts: Sequence[Prompt],
        identity: Mapping[str, Any],
        *,
        resume: bool = False,
        overwrite: bool = False,
    ) -> None:
        self.path = path
        self.partial_path = _partial_path(path)
        self.run_path = path.with_name(path.name + ".run")
        self._prompts = prompts
        self._identity = identity
        self._waiting: dict[int, dict[str, Any]] = {}
        self._next = 0
        self._keep_bytes = 0
        self._synced = time.monotonic()
        self._partial: TextIO | None = None
        self._file: TextIO | None = None
        if check_results(path, resume=resume, overwrite=overwrite) and resume:
            self._check_identity()
            self._read_existing()

    @property
    def finished(self) -> frozenset[int]:
        """Indices that need not run again."""
        return frozenset(range(self._next)) | frozenset(self._waiting)

    def add(self, record: dict[str, Any]) -> None:
        """Stores the result of prompt record["index"]. Raises ResultsError if it cannot be written."""
        try:
            if self._file is None:
                self._start()
            self._waiting[record["index"]] = record
            if record["index"] != self._next:
                if self._partial is None:
                    self._partial = self.partial_path.open("a", encoding="utf-8", newline="\n")
                _append(self._partial, record)
            self._advance()
            # A sync takes milliseconds, enough for hundreds of tokens.
            if time.monotonic() - self._synced >= 1:
                self._sync()
        except OSError as error:
            raise self._unwritable(error) from error

    def close(self) -> None:
        """Closes the files; removes the side file if it is empty. Raises ResultsError if they cannot be written."""
        try:
            self._sync()
            for file in (self._file, self._partial):
                if file is not None:
                    file.close()
            if self._file is not None and not self._waiting:
                self.partial_path.unlink(missing_ok=True)
        except OSError as error:
            raise self._unwritable(error) from error

    def _unwritable(self, error: OSError) -> ResultsError:
        remedy = "correct that, then continue with --resume"
        return ResultsError(f"cannot write {self.path}: {error.strerror or error}; {remedy}")

    def _sync(self) -> None:
        for file in (self._file, self._partial):
            if file is not None and not file.closed:
                os.fsync(file.fileno())
        self._synced = time.monotonic()

    def _start(self) -> None:
        """Opens the files, without torn lines and results to be rerun; resumable at any moment."""
        self._file = self.path.open("r+" if self.path.exists() else "w", encoding="utf-8", newline="\n")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ResultsError(f"another llmc run writes {self.path}: wait for it, or name another file") from None
        if self._waiting or self.partial_path.exists():
            _replace(self.partial_path, self._waiting.values())
        self._file.truncate(self._keep_bytes)
        self._file.seek(0, os.SEEK_END)
        _replace(self.run_path, [self._identity])
        self._advance()

    def _advance(self) -> None:
        assert self._file is not None
        while (record := self._waiting.get(self._next)) is not None:
            _append(self._file, record)
            del self._waiting[self._next]
            self._next += 1

    def _check_identity(self) -> None:
        try:
            before = json.loads(read_regular(self.run_path, 1 << 24))
        except FileNotFoundError:
            raise ResultsError(
                f"{self.path} has no {self.run_path.name} beside it that says how it was made: pass --overwrite to "
                "replace it"
            ) from None
        except (OSError, ValueError, RecursionError) as error:
            raise ResultsError(f"cannot read {self.run_path}: pass --overwrite to replace the results") from error
        differs = difference(before, self._identity)
        if differs is not None:
            raise ResultsError(f"{self.path} was made with {differs}: resume with the same, or pass --overwrite")

    def _read_existing(self) -> None:
        """Loads existing results; failed requests run again."""
        for position, (record, end) in enumerate(_read_lines(self.path)):
            self._check(record, self.path)
            if record["index"] != position:
                raise ResultsError(
                    f"{self.path} has index {record['index']} where {position} belongs: it was not written by "
                    "llmc run, pass --overwrite to replace it"
                )
            if "error" in record:
                continue
            if position == self._next:
                self._next += 1
                self._keep_bytes = end
            else:
                self._waiting[position] = record
        for record, _ in _read_lines(self.partial_path):
            self._check(record, self.partial_path)
            if record["index"] >= self._next and "error" not in record:
                self._waiting[record["index"]] = record

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


def check_results(path: Path, *, resume: bool = False, overwrite: bool = False) -> bool:
    """Whether there are results of an earlier run, for a check before a model is loaded.

    Raises ResultsError for results that neither `resume` nor `overwrite` allow for, and if none can be written.
    """
    try:
        check_outputs({"--output": path}, appended={"--output": path})
    except OutputError as error:
        raise ResultsError(str(error)) from error
    if path.exists() and not path.is_file():
        raise ResultsError(f"cannot write --output {path}: it is not a regular file; name another path")
    exists = any(file.exists() and file.stat().st_size > 0 for file in (path, _partial_path(path)))
    if exists and not resume and not overwrite:
        raise ResultsError(f"{path} exists: pass --resume to continue it or --overwrite to replace it")
    return exists


def _partial_path(path: Path) -> Path:
    return path.with_name(path.name + ".partial")


def _replace(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    """Writes a file of JSON lines atomically."""
    write_replaced(path, "".join(_line(record) for record in records))


def _line(record: Mapping[str, Any]) -> str:
    return json.dumps(record, ensure_ascii=False) + "\n"


def _append(file: TextIO, record: Mapping[str, Any]) -> None:
    file.write(_line(record))
    file.flush()


def _read_lines(path: Path) -> list[tuple[dict[str, Any], int]]:
    """(record, end offset) of every complete line; a torn last line is skipped."""
    if not path.exists():
        return []
    try:
        data = read_regular(path, 1 << 36)
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
