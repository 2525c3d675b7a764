"""Text parsers that are written as if the whole text were there, and are fed it in pieces of any size."""

from __future__ import annotations

from collections.abc import Generator
from typing import TypeVar

from .chat_output import ChatDelta

_Result = TypeVar("_Result")
Step = Generator[None, None, _Result]
"""Part of a parser; yields where it needs more text."""


def overlap(text: str, marker: str) -> int:
    """Length of the longest proper prefix of `marker` that ends `text`."""
    longest = min(len(marker) - 1, len(text))
    return next((length for length in range(longest, 0, -1) if text.endswith(marker[:length])), 0)


class TextMachine:
    """Subclasses write `_run`, which decides character by character, so that the pieces' borders never matter.

    The buffer starts with the text that may still turn out to be content; `_position` is where reading goes on.
    """

    def __init__(self) -> None:
        self._buffer = ""
        self._position = 0
        self._ended = False
        self._deltas: list[ChatDelta] = []
        self._machine: Step[None] | None = self._run()
        self._resume()

    def push(self, text: str) -> list[ChatDelta]:
        """Takes the next piece of text; returns what became certain."""
        self._buffer += text
        return self._resume()

    def finish(self) -> list[ChatDelta]:
        """Ends the text; returns the rest."""
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
        """Gives out content, joined with what came just before."""
        if not text:
            return
        if self._deltas and self._deltas[-1].content:
            text = self._deltas.pop().content + text
        self._deltas.append(ChatDelta(content=text))

    def _commit(self) -> None:
        """What was read is dealt with."""
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
        """Reads `text` if it is next. cut: the end of everything may cut it short."""
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

    def _content_until(self, marker: str) -> Step[bool]:
        """Gives out content up to `marker`, behind which reading goes on; False when there is none.

        White space before the marker stays at the start of the buffer: it is content only if no call follows.
        """
        while True:
            found = self._buffer.find(marker)
            end = found if found >= 0 else len(self._buffer) - overlap(self._buffer, marker)
            end = len(self._buffer[:end].rstrip())
            self._content(self._buffer[:end])
            self._buffer = self._buffer[end:]
            if found >= 0:
                self._position = found - end + len(marker)
                return True
            if self._ended:
                self._content(self._buffer)
                self._buffer = ""
                return False
            yield

    def _rest(self) -> Step[None]:
        """The buffer and all that follows is content."""
        self._position = 0
        while True:
            self._content(self._buffer)
            self._buffer = ""
            if self._ended:
                return
            yield
