"""Text parsers that are written as if the whole text were available, and fed in pieces of any size."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import TypeVar

from .chat_output import ChatDelta

_Result = TypeVar("_Result")
Step = Generator[None, None, _Result]
"""Part of a parser; yields when it needs more text."""


def overlap(text: str, marker: str) -> int:
    """Length of the longest proper prefix of `marker` that ends `text`."""
    longest = min(len(marker) - 1, len(text))
    return next((length for length in range(longest, 0, -1) if text.endswith(marker[:length])), 0)


class TextMachine:
    """Base of such parsers. Subclasses write `_run`, which decides character by character, so that borders of pieces
    never matter.

    The buffer starts with text that may still turn out to be content; reading continues at `_position`.
    """

    def __init__(self) -> None:
        self._buffer = ""
        self._position = 0
        self._ended = False
        self._deltas: list[ChatDelta] = []
        self._machine: Step[None] | None = self._run()
        self._resume()

    def push(self, text: str) -> list[ChatDelta]:
        """Takes the next piece of text; returns the deltas that are certain now."""
        self._buffer += text
        return self._resume()

    def finish(self) -> list[ChatDelta]:
        """Ends the text; returns the remaining deltas."""
        self._ended = True
        return self._resume()

    def _run(self) -> Step[None]:
        """Reads the whole text."""
        raise NotImplementedError

    def _resume(self) -> list[ChatDelta]:
        if self._machine is not None:
            try:
                next(self._machine)
            except StopIteration:
                self._machine = None
        deltas, self._deltas = self._deltas, []
        return deltas

    def _content(self, text: str) -> None:
        """Emits content, joined with the content just before."""
        if not text:
            return
        if self._deltas and self._deltas[-1].content:
            text = self._deltas.pop().content + text
        self._deltas.append(ChatDelta(content=text))

    def _reasoning(self, text: str) -> None:
        """Emits reasoning."""
        if text:
            self._deltas.append(ChatDelta(reasoning_content=text))

    def _commit(self) -> None:
        """Drops from the buffer what was read."""
        self._buffer, self._position = self._buffer[self._position :], 0

    def _peek(self) -> Step[str]:
        """The next character; empty at the end."""
        while self._position == len(self._buffer) and not self._ended:
            yield
        return self._buffer[self._position : self._position + 1]

    def _space(self) -> Step[None]:
        """Skips white space."""
        while (yield from self._peek()).isspace():
            self._position += 1

    def _literal(self, text: str, *, cut: bool = False) -> Step[bool]:
        """Reads `text` if it comes next. cut: the end of the input may truncate it."""
        start = self._position
        for char in text:
            found = yield from self._peek()
            if found != char:
                if cut and not found and self._position > start:
                    return True
                self._position = start
                return False
            self._position += 1
        return True

    def _content_until(self, *markers: str) -> Step[str]:
        """Emits content up to the first of `markers` and continues after it; returns it, or nothing if there is none.

        White space before the marker stays at the start of the buffer: it is content only if no call follows.
        """
        found = yield from self._until(markers, self._content)
        if not found:
            self._content(self._buffer)
            self._buffer = ""
        return found

    def _until(self, markers: tuple[str, ...], emit: Callable[[str], None]) -> Step[str]:
        """As `_content_until`, for text of any kind; at the end, white space and half a marker stay in the buffer."""
        while True:
            places = [(place, marker) for marker in markers if (place := self._buffer.find(marker)) >= 0]
            place, found = min(places, default=(len(self._buffer), ""))
            if not found:
                place -= max(overlap(self._buffer, marker) for marker in markers)
            end = len(self._buffer[:place].rstrip())
            emit(self._buffer[:end])
            self._buffer = self._buffer[end:]
            if found:
                self._position = place - end + len(found)
                return found
            if self._ended:
                return ""
            yield

    def _rest(self) -> Step[None]:
        """Treats the buffer and everything after it as content."""
        self._position = 0
        while True:
            self._content(self._buffer)
            self._buffer = ""
            if self._ended:
                return
            yield
