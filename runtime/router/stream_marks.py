"""Filters the events of a stream: which ones may go to the client, and which tokens it has then.

A replica describes in comments (`llmc.runtime.server.failover`) the events before them. Events are forwarded up to a
comment and no further. So an interrupted stream can continue elsewhere without a byte lost or doubled.
"""

from __future__ import annotations

import json
from typing import Any

_COMMENT = b": llmc "
_ERROR = b'data: {"error"'
_DONE = b"data: [DONE]\n\n"
_MAX_EVENT = 64 << 20


class StreamFailed(Exception):
    """A replica ended a stream with an error. event: its text, used if no other replica can continue."""

    def __init__(self, code: str, event: bytes) -> None:
        super().__init__(code)
        self.event = event


class StreamMarks:
    """The part of a stream that one client has, across replicas."""

    def __init__(self, num_choices: int) -> None:
        self.begun = self.done = False
        self._tokens: list[bytearray | None] = [None] * num_choices
        self._ended = bytearray(num_choices)
        self._buffer = b""
        self._held: list[bytes] = []

    def feed(self, piece: bytes) -> bytes:
        """Takes bytes of a replica; returns those that may go to the client. Raises StreamFailed, and ValueError for
        bytes that are no event stream."""
        told: list[bytes] = []
        buffer = self._buffer + piece if self._buffer else piece
        start = 0
        while (end := buffer.find(b"\n\n", start)) >= 0:
            event = buffer[start : end + 2]
            start = end + 2
            if event.startswith(_COMMENT):
                self._note(event)
                told += self._held
                self._held.clear()
                continue
            if event.startswith(_ERROR):
                self._check(event)
            self._held.append(event)
            if event == _DONE:
                self.done = True
                told += self._held
                self._held.clear()
        self._buffer = buffer[start:]
        if len(self._buffer) > _MAX_EVENT:
            raise ValueError(f"an event of more than {_MAX_EVENT} bytes")
        return b"".join(told)

    def restart(self) -> None:
        """Drops the held events: they will come again."""
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

    def _note(self, comment: bytes) -> None:
        words = comment[len(_COMMENT) :].split()
        self.begun = True
        if words[0] == b"head":
            return
        choice = int(words[0])
        if len(words) > 1 and words[-1] == b"end":
            self._ended[choice] = 1
            words.pop()
        if len(words) < 2:
            return
        tokens = self._tokens[choice]
        if tokens is None:
            self._tokens[choice] = bytearray(words[1])
        else:
            tokens += b","
            tokens += words[1]

    def _check(self, event: bytes) -> None:
        error = json.loads(event[len(b"data: ") :])["error"]
        # An error caused by the request itself would occur elsewhere, too.
        if error.get("type") == "server_error":
            self.restart()
            raise StreamFailed(str(error.get("code")), event)
