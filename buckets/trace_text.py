"""The lines of a trace: from a file or stdin ("-"), plain or gzipped, with or without a byte order mark."""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, NamedTuple, TextIO, cast

from llmc.regular_file import open_regular

from .bucket import BucketError

STDIN = Path("-")
MAX_LINE = 1 << 20
# About 10^8 requests: beyond any trace, but a small file may expand to it.
MAX_UNPACKED_BYTES = 1 << 34
_BATCH_CHARS = 1 << 18
_GZIP = b"\x1f\x8b"


class TraceError(BucketError):
    """A trace cannot be read; the message names the file and, if known, the line."""


class Batch(NamedTuple):
    """Some unmodified lines of a file, with their ends. number: of the first one, counted from 1."""

    number: int
    raw: list[str]

    def numbered(self) -> list[tuple[int, str]]:
        """The non-empty lines, stripped."""
        return [(n, stripped) for n, line in enumerate(self.raw, self.number) if (stripped := line.strip())]

    def behind(self, number: int) -> Batch:
        """The lines after line `number`."""
        return Batch(number + 1, self.raw[number + 1 - self.number :])


def name_of(path: Path) -> str:
    """The display name of a trace: the file's name, or "stdin"."""
    return "stdin" if path == STDIN else path.name


def is_packed(path: Path) -> bool:
    """Whether a file is gzipped, whatever its name. Raises OSError."""
    with open_regular(path) as file:
        return file.read(len(_GZIP)) == _GZIP


@contextmanager
def opened(path: Path) -> Iterator[Iterator[Batch]]:
    """The lines of `path`, some thousands at a time, in memory only while in use.

    Raises TraceError for a file that cannot be read, is not UTF-8, or has a line of more than MAX_LINE characters. Also
    for a damaged gzip file, or one that expands beyond MAX_UNPACKED_BYTES.
    """
    try:
        # stdin is not this function's to close.
        with open(0, "rb", closefd=False) if path == STDIN else open_regular(path) as file:
            packed = file.peek(len(_GZIP))[: len(_GZIP)] == _GZIP
            data = cast(BinaryIO, gzip.GzipFile(fileobj=file)) if packed else file
            with io.TextIOWrapper(data, encoding="utf-8-sig", errors="strict") as lines:
                yield _batches(lines, path, data if packed else None)
    except (zlib.error, EOFError, gzip.BadGzipFile) as error:
        raise TraceError(f"trace {path} is a damaged gzip file: {error}; pack it again") from error
    except OSError as error:
        raise TraceError(f"cannot read trace {path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise TraceError(f"trace {path} is not UTF-8 text: {error.reason} at byte {error.start}") from error


def _batches(lines: TextIO, path: Path, unpacked: BinaryIO | None) -> Iterator[Batch]:
    number, tail = 1, ""
    while read := lines.read(_BATCH_CHARS):
        if unpacked is not None and unpacked.tell() > MAX_UNPACKED_BYTES:
            raise TraceError(f"trace {path} unpacks to more than {MAX_UNPACKED_BYTES} bytes: cut it into parts")
        whole, end, rest = (tail + read).rpartition("\n")
        raw = [f"{line}\n" for line in whole.split("\n")] if end else []
        _check_length(path, number, [*raw, rest])
        if raw:
            yield Batch(number, raw)
        number, tail = number + len(raw), rest
    if tail:
        yield Batch(number, [tail])


def _check_length(path: Path, number: int, lines: list[str]) -> None:
    if max(map(len, lines)) > MAX_LINE:
        long = next(n for n, line in enumerate(lines, number) if len(line) > MAX_LINE)
        raise TraceError(f"{path}:{long}: the line is longer than {MAX_LINE} characters")
