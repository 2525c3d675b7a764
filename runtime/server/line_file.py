"""A file that grows by whole lines: reopened on request for log rotation, or rotated by size."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path


class LineFile:
    """Appends lines to a file; every method may be called from any thread, and none raises after the constructor.

    path None: standard output. max_bytes: a file that would exceed it is first renamed to NAME.1, replacing an older
    one; None: never. header: first line of every new file. num_dropped counts lines that could not be written, with one
    message on standard error until writing works again. Raises OSError when the file cannot be opened.
    """

    def __init__(self, path: Path | None, *, max_bytes: int | None = None, header: str | None = None) -> None:
        self.path = path
        self.num_dropped = 0
        self._max_bytes = max_bytes
        self._header = header
        self._lock = threading.Lock()
        self._complained = False
        self._fd: int | None = None
        self._size = 0
        self._open()

    def write(self, line: str) -> None:
        """Appends `line` and a line feed in one write, so that lines of several processes do not mix."""
        data = line.encode("utf-8", "backslashreplace") + b"\n"
        with self._lock:
            try:
                if self._fd is None:
                    self._open()
                if self._max_bytes is not None and self._size > 0 and self._size + len(data) > self._max_bytes:
                    self._rotate()
                self._append(data)
                self._complained = False
            except OSError as error:
                self.num_dropped += 1
                self._complain(error)

    def reopen(self) -> None:
        """Closes the file and opens its path again, as a log rotator wants after renaming the file."""
        if self.path is None:
            return
        with self._lock:
            try:
                self._close()
                self._open()
            except OSError as error:
                self._complain(error)

    def close(self) -> None:
        """Closes the file; a later write opens it again."""
        with self._lock:
            self._close()

    def _open(self) -> None:
        if self.path is None:
            self._fd = 1
            return
        self._fd = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o640)
        self._size = os.fstat(self._fd).st_size
        if self._size == 0 and self._header is not None:
            self._append(self._header.encode() + b"\n")

    def _append(self, data: bytes) -> None:
        assert self._fd is not None
        while data:  # a pipe or a full disk may accept only a part
            written = os.write(self._fd, data)
            self._size += written
            data = data[written:]

    def _rotate(self) -> None:
        assert self.path is not None
        self._close()
        os.replace(self.path, self.path.with_name(self.path.name + ".1"))
        self._open()

    def _close(self) -> None:
        if self._fd is not None and self.path is not None:
            os.close(self._fd)
        self._fd = None

    def _complain(self, error: OSError) -> None:
        if not self._complained:
            self._complained = True
            name = self.path or "standard output"
            print(f"llmc: cannot write to {name}: {error.strerror or error}; lines are dropped", file=sys.stderr)
