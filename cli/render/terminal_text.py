"""Keeps control characters of any input from the terminal: names, prompts, errors and model output may contain some."""

from __future__ import annotations

import codecs
import json
import os
import re
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from io import TextIOWrapper
from typing import Any, TextIO

# Characters that could move the cursor, retitle the window, fill the clipboard, forge a line or reverse text: C0 but
# tab and newline, DEL and C1, line separators, bidirectional controls. Halves of surrogate pairs cannot be printed.
_OBEYED = r"\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069"
_CONTROLS = re.compile(f"[{_OBEYED}]")
_UNPRINTABLE = re.compile(f"[{_OBEYED}\ud800-\udfff]")
_REFUSE = ("strict", "surrogateescape")  # how streams of other encodings treat characters that these lack


def escaped(text: str) -> str:
    """`text` with control characters written as in JSON, so that they are visible and JSON stays valid."""
    return _UNPRINTABLE.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def printable(text: str) -> str:
    """`text` without control characters: for model output, which may repeat foreign text."""
    return _CONTROLS.sub("", text)


class EscapedStream:
    """A text stream that escapes everything written to it; all else is the wrapped stream's.

    lossy: what cannot be written is dropped, as a log on a full disk must not end a server.
    rich_proxied_file: the wrapped stream, for rich, whose own sequences are wanted. `console.Console` escapes rich's
    input.
    """

    def __init__(self, stream: TextIO, *, lossy: bool = False) -> None:
        self.rich_proxied_file = stream
        self._ignored = (OSError,) if lossy else ()

    def write(self, text: str) -> int:
        with suppress(*self._ignored):
            self.rich_proxied_file.write(escaped(text))
        return len(text)

    def flush(self) -> None:
        with suppress(*self._ignored):
            self.rich_proxied_file.flush()

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.rich_proxied_file, name)


def exact(stream: TextIO | EscapedStream) -> TextIO:
    """The stream behind an EscapedStream, for texts that a program reads."""
    return stream.rich_proxied_file if isinstance(stream, EscapedStream) else stream


def escape_streams() -> None:
    """Makes stdout and stderr escape everything written from now on."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and not isinstance(stream, EscapedStream):
            setattr(sys, name, EscapedStream(stream, lossy=name == "stderr"))


def json_text(value: object, indent: int | None = None) -> str:
    """JSON for stdout, whose encoding may lack characters: JSON has escapes of its own for these."""
    return json.dumps(value, ensure_ascii=not _takes_all(getattr(sys.stdout, "encoding", None)), indent=indent)


def _takes_all(encoding: str | None) -> bool:
    """Whether an encoding has all characters; None: of a stream of text in memory."""
    return encoding is None or codecs.lookup(encoding).name == "utf-8"


@contextmanager
def usable_streams() -> Iterator[None]:
    """stdout and stderr take any text: if closed, for the block; if their encoding lacks characters, from now on."""
    with ExitStack() as stack:
        for name in ("stdout", "stderr"):
            stream = getattr(sys, name)
            if stream is None:
                # Without stderr, its lines would go to stdout.
                setattr(sys, name, stack.enter_context(open(os.devnull, "w", encoding="utf-8")))
                stack.callback(setattr, sys, name, None)
                continue
            stream = exact(stream)
            if isinstance(stream, TextIOWrapper) and stream.errors in _REFUSE and not _takes_all(stream.encoding):
                stream.reconfigure(errors="backslashreplace")
        yield


@contextmanager
def escaped_streams() -> Iterator[None]:
    """`escape_streams` for the duration of the block."""
    before = {name: getattr(sys, name) for name in ("stdout", "stderr")}
    escape_streams()
    try:
        yield
    finally:
        for name, stream in before.items():
            if isinstance(getattr(sys, name), EscapedStream):  # otherwise somebody else has replaced it
                setattr(sys, name, stream)
