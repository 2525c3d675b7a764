"""A file that grows by whole lines: reopened on request for log rotation, or rotated by size."""

from __future__ import annotations

import contextlib
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
        self._torn = False  # the file ends in a part of a line
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
        self._size, self._torn = os.fstat(self._fd).st_size, False
        if self._size == 0 and self._header is not None:
            try:
                self._append(self._header.encode() + b"\n")
            except OSError:
                self._close()  # the next write begins with the header again
                raise

    def _append(self, data: bytes) -> None:
        """Appends all of `data` or, as far as the file allows, nothing."""
        assert self._fd is not None
        if self._torn:
            data = b"\n" + data
        written = 0
        try:
            while written < len(data):  # a pipe or a full disk may accept only a part
                written += os.write(self._fd, data[written:])
        except OSError:
            if written > 0:
                self._take_back(written)
            raise
        self._size += written
        self._torn = False

    def _take_back(self, written: int) -> None:
        """Removes the part of a line that was written, so that the next line is not appended to it."""
        assert self._fd is not None
        was_torn, self._torn = self._torn, True
        with contextlib.suppress(OSError):  # a pipe keeps it
            end = os.lseek(self._fd, 0, os.SEEK_CUR)
            if os.fstat(self._fd).st_size == end:  # else another process has appended since
                os.ftruncate(self._fd, end - written)
                os.lseek(self._fd, end - written, os.SEEK_SET)  # standard output may have no O_APPEND
                self._torn = was_torn

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
