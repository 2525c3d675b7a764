"""Filters the events of a stream: which ones may go to the client, and which tokens it has then.

A replica describes in comments (`llmc.runtime.server.failover`) the events before them. Events are forwarded up to a
comment and no further. So an interrupted stream can continue elsewhere without a byte lost or doubled.
"""

from __future__ import annotations

from typing import Any

from .dialects import Dialect

_COMMENT = b": llmc "
_MAX_EVENT = 64 << 20


class StreamFailed(Exception):
    """A replica ended a stream with an error. event: its text, used if no other replica can continue."""

    def __init__(self, code: str, event: bytes) -> None:
        super().__init__(code)
        self.event = event


class StreamMarks:
    """The part of a stream that one client has, across replicas. num_events: events that were forwarded. failure: why
    the rest must come from another replica; set once `feed` has returned what comes before it."""

    def __init__(self, dialect: Dialect, num_choices: int) -> None:
        self.begun = self.done = False
        self.num_events = 0
        self.failure: StreamFailed | ValueError | None = None
        self.dialect = dialect
        self._tokens: list[bytearray | None] = [None] * num_choices
        self._ended = bytearray(num_choices)
        self._buffer = b""
        self._held: list[bytes] = []

    def feed(self, piece: bytes) -> bytes:
        """Takes bytes of a replica; returns those that may go to the client, or sets `failure` behind them."""
        told: list[bytes] = []
        buffer = self._buffer + piece if self._buffer else piece
        start = 0
        try:
            while (end := buffer.find(b"\n\n", start)) >= 0:
                self._take(buffer[start : end + 2], told)
                start = end + 2
        except StreamFailed as error:
            self.failure = error
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            self.failure = ValueError(f"bytes that are no event stream: {error}")
        self._buffer = buffer[start:]
        if len(self._buffer) > _MAX_EVENT:
            self.failure = ValueError(f"an event of more than {_MAX_EVENT} bytes")
        return b"".join(told)

    def restart(self) -> None:
        """Drops the held events: they will come again."""
        self.failure = None
        self._buffer = b""
        self._held.clear()

    def sent(self) -> list[dict[str, Any]] | None:
        """What the client has, in the form for another replica; None: nothing."""
        if not self.begun:
            return None
        return [
            {"token_ids": [] if not tokens else [int(word) for word in tokens.split(b",")], "ended": bool(ended)}
            for tokens, ended in zip(self._tokens, self._ended, strict=True)
        ]

    def _take(self, event: bytes, told: list[bytes]) -> None:
        if event.startswith(_COMMENT):
            self._note(event)
        else:
            self._held.append(event)
            if not self._ends(event):
                return
            self.done = True
        told += self._held
        self.num_events += len(self._held)
        self._held.clear()

    def _ends(self, event: bytes) -> bool:
        """Whether nothing comes behind an event. Raises StreamFailed."""
        error = self.dialect.error_in(event)
        if error is None:
            return event == self.dialect.done
        if error.own:
            raise StreamFailed(error.code, event)
        # An error caused by the request itself would occur elsewhere, too.
        return not self.dialect.done

    def _note(self, comment: bytes) -> None:
        words = comment[len(_COMMENT) :].split()
        self.begun = True
        if words[0] == b"head":
            return
        choice = int(words[0])
        if len(words) > 1 and words[-1] == b"end":
            self._ended[choice] = 1
            self.done = self.done or not (self.dialect.done or 0 in self._ended)
            words.pop()
        if len(words) < 2:
            return
        tokens = self._tokens[choice]
        if tokens is None:
            self._tokens[choice] = bytearray(words[1])
        else:
            tokens += b","
            tokens += words[1]
