"""Server-sent events of a body that arrived in pieces."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from .http import Piece

DONE = b"[DONE]"


class TornStream(ValueError):
    """A stream that stops in the middle of an event."""


def events(pieces: Iterable[Piece]) -> Iterator[tuple[int, bytes]]:
    """(arrival in ns of its last byte, data) of each event; comments and other fields are left out.

    Raises TornStream after the whole events when bytes are left over.
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
