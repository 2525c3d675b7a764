"""Parses server-sent events from a body that arrived in pieces."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from .http import Piece

DONE = b"[DONE]"


class TornStream(ValueError):
    """A stream ended within an event."""


def events(pieces: Iterable[Piece]) -> Iterator[tuple[int, bytes]]:
    """(arrival of its last byte in ns, data) of each event; comments and other fields are skipped.

    Raises TornStream after the last complete event if bytes remain.
    """
    rest = b""
    for time_ns, piece in pieces:
        rest += piece
        if b"\r" in rest:
            rest = rest.replace(b"\r\n", b"\n")
        if b"\n\n" not in rest:
            continue
        *blocks, rest = rest.split(b"\n\n")
        for block in blocks:
            data = [line[5:].removeprefix(b" ") for line in block.split(b"\n") if line.startswith(b"data:")]
            if data:
                yield time_ns, b"\n".join(data)
    if rest.strip():
        raise TornStream(f"the stream stops in the middle of an event: {rest[-80:]!r}")
