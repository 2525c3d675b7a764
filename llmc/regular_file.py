"""Reads files with untrusted names: never waits for a pipe, never reads more than expected, never trusts a size.

Imports nothing of llmc: compiler, runtime and tools share it.
"""

from __future__ import annotations

import errno
import io
import json
import os
import stat
from pathlib import Path
from typing import Any, NoReturn

_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
_SHOWN = 40
_CHUNK_BYTES = 1 << 20
_POINTER = b"version https://git-lfs.github.com/spec/"


class JsonError(ValueError):
    """The text is not JSON, or JSON that no file of llmc contains; the message is part of a sentence."""


def open_regular(path: Path) -> io.BufferedReader:
    """Opens a file for reading. Raises OSError, also for a pipe, directory, socket or device."""
    _check(path, os.stat(path))  # opening a device may do something
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        _check(path, os.fstat(descriptor))
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def why_pointer(begin: bytes) -> str | None:
    """The rest of a sentence on a file that begins so, if it stands for another one, as in a clone without Git LFS."""
    if not begin.startswith(_POINTER):
        return None
    return "is a pointer of Git LFS and not the file itself: run `git lfs pull` in its folder, or download it again"


def read_regular(path: Path, most: int) -> bytes:
    """All bytes of a file of at most `most` bytes. Raises OSError whose strerror is the explanation."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        data = file.read(size + 1) if size <= most else b""
        # The file may grow meanwhile, or not report its size.
        while size < len(data) <= most and (more := file.read(_CHUNK_BYTES)):
            data += more
    if size > most or len(data) > most:
        raise OSError(errno.EFBIG, f"it has {max(size, len(data))} bytes, at most {most} are read", str(path))
    return data


def read_text(path: Path, most: int, encoding: str = "utf-8") -> str:
    """`read_regular` as text. Raises UnicodeDecodeError as well."""
    return decoded(read_regular(path, most), encoding)


def decoded(data: bytes, encoding: str = "utf-8") -> str:
    """Text as Python reads it from a file: every line ending becomes a newline. Raises UnicodeDecodeError."""
    return data.decode(encoding).replace("\r\n", "\n").replace("\r", "\n")


def parse_json(data: str | bytes, *, infinity: bool = False) -> Any:
    """The value of standard JSON text: no NaN, no number beyond a double, no duplicate name, no half surrogate pair.

    infinity: allows Infinity and -Infinity, as Python writes them. Raises JsonError.
    """
    constant = _infinite if infinity else _constant
    try:
        value = json.loads(data, parse_constant=constant, parse_float=_finite, object_pairs_hook=_once)
        # JSON can express half a character, which nothing else can store.
        if (b"\\ud" if isinstance(data, bytes) else "\\ud") in data.lower():  # type: ignore[operator]
            json.dumps(value, ensure_ascii=False).encode()
        return value
    except JsonError:
        raise
    except RecursionError:
        raise JsonError("it is nested too deeply") from None
    except ValueError as error:  # no JSON, no UTF-8, or an integer of thousands of digits
        why = " ".join(str(error).split())
        raise JsonError("an integer has thousands of digits" if why.startswith("Exceeds") else why[:200]) from None


def _check(path: Path, info: os.stat_result) -> None:
    if not stat.S_ISREG(info.st_mode):
        kind = _KINDS.get(stat.S_IFMT(info.st_mode), "something else")
        raise OSError(errno.EINVAL, f"it is {kind}, not a regular file", str(path))


def _constant(text: str) -> NoReturn:
    raise JsonError(f"{text} is not a JSON number")


def _infinite(text: str) -> float:
    if text == "NaN":
        _constant(text)
    return float(text)


def _finite(text: str) -> float:
    value = float(text)
    if value in (float("inf"), float("-inf")):
        raise JsonError(f"{text[:_SHOWN]} is too large a number")
    return value


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        name = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise JsonError(f"the name {name[:_SHOWN]!r} is there twice")
    return found
