"""The events of a stream on their way through: what a client may have, and which tokens it has then.

A replica says in comments (`llmc.runtime.server.failover`) what the events before them told. Events are passed on up to
a comment and no further, so a stream that breaks off can go on elsewhere without a byte lost or doubled.
"""

from __future__ import annotations

import json
from typing import Any

_COMMENT = b": llmc "
_ERROR = b'data: {"error"'
_DONE = b"data: [DONE]\n\n"
_MAX_EVENT = 64 << 20


class StreamFailed(Exception):
    """A replica ended a stream with an error of its own. event: its words, if no other replica can."""

    def __init__(self, code: str, event: bytes) -> None:
        super().__init__(code)
        self.event = event


class StreamMarks:
    """What one client has of a stream, whichever replicas it came from."""

    def __init__(self, num_choices: int) -> None:
        self.begun = self.done = False
        self._tokens: list[bytearray | None] = [None] * num_choices
        self._ended = bytearray(num_choices)
        self._buffer = b""
        self._held: list[bytes] = []

    def feed(self, piece: bytes) -> bytes:
        """Takes what a replica sent; returns what the client may have. Raises StreamFailed, and ValueError for what is
        no stream of events."""
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
        """Forgets what was held back: it comes again."""
        self._buffer = b""
        self._held.clear()

    def sent(self) -> list[dict[str, Any]] | None:
        """What the client has, as another replica is told; None: nothing."""
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
        # What the request itself is to blame for would fail elsewhere, too.
        if error.get("type") == "server_error":
            self.restart()
            raise StreamFailed(str(error.get("code")), event)
