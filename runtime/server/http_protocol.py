"""uvicorn's HTTP protocol with limits on a request's size and on a client's time.

uvicorn itself accepts heads of any length. It waits without limit for a head, for a body, and for a client to read its
answer. It sends chunks to clients of HTTP/1.0, which do not know them.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Mapping
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from .file_limit import FileWatch
from .upgrade_offers import DecliningParser

MAX_HEAD_BYTES = 64 << 10
INTERIM = "llmc.interim"
"""Key in the scope of a request: a function that sends the interim answer 102."""
_ARRIVAL = "llmc.arrival"
PROCESSING = b"HTTP/1.1 102 Processing\r\n\r\n"
_FIRST_PROBE_S, _LAST_PROBE_S = 0.05, 2.0
_FILES = FileWatch()
_TOO_SLOW = "The request took too long to arrive."


class _Arrival:
    """Of a request's body. late: it did not come in time, and the client was told so."""

    late = False


def arrived_late(scope: Mapping[str, Any]) -> bool:
    """Whether a request whose body ends early has got a 408; otherwise the client has left."""
    arrival = scope.get(_ARRIVAL)
    return isinstance(arrival, _Arrival) and arrival.late


class BoundedHttpProtocol(HttpToolsProtocol):
    """Bounds the head of a request and the time of a client.

    Answers 400 to a request line and headers above MAX_HEAD_BYTES, at the latest one read later. Answers 408 to a head,
    or a following body, that is incomplete after client_timeout_s (None: no limit). Aborts when a client reads nothing
    for that long. Still answers a client that shut down its sending side after the request (half-closed).
    """

    client_timeout_s: float | None = None

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._declining = DecliningParser(self)
        self.parser = self._declining  # type: ignore[assignment]  # it has what uvicorn uses
        self._in_head = True
        self._num_heads = self._head_bytes = 0
        self._reading: asyncio.TimerHandle | None = None
        self._writing: asyncio.TimerHandle | None = None
        self._probing: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        super().connection_made(transport)
        connection = transport.get_extra_info("socket")
        if connection is not None:
            _FILES.note(connection.fileno())
        self._start_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_reading()
        self._stop_writing()
        self._stop_probing()
        self._declining.close()
        super().connection_lost(exc)

    def eof_received(self) -> bool:  # type: ignore[override]  # as asyncio has it
        """True, to keep the connection: after its last request the client may wait for the answer."""
        answering = self.cycle is not None and not self.cycle.response_complete
        if not answering or not self._in_head or self.scheme == "https":
            return False
        last = self.pipeline[0][0] if self.pipeline else self.cycle
        last.keep_alive = False
        self._stop_reading()
        self._probe_later(_FIRST_PROBE_S)
        return True

    def pause_writing(self) -> None:
        super().pause_writing()
        if self.client_timeout_s is not None:
            self._writing = self.loop.call_later(self.client_timeout_s, self.transport.abort)

    def resume_writing(self) -> None:
        self._stop_writing()
        super().resume_writing()

    def data_received(self, data: bytes) -> None:
        before = self._in_head, self._num_heads
        super().data_received(data)
        # A read that ends one head may begin the next one, which is counted from the next read on.
        if self._in_head and before == (True, self._num_heads):
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
                self.send_400_response("The head of the request is too long.")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if self._reading is None:  # the first head was timed from the start of the connection
            self._start_reading()

    def on_headers_complete(self) -> None:
        size = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        if size > MAX_HEAD_BYTES:
            # The parser turns it into the error that gets the answer 400.
            raise ValueError("the head of the request is too long")
        self._in_head, self._head_bytes = False, 0
        self._num_heads += 1
        self._start_reading()
        # Extensions of ours.
        self.scope[INTERIM] = self._interim(self.scope)  # type: ignore[literal-required]
        self.scope[_ARRIVAL] = _Arrival()  # type: ignore[literal-required]
        super().on_headers_complete()
        if self.scope["http_version"] == "1.0":
            _send_unchunked(self.cycle)

    def _interim(self, scope: Any) -> Callable[[], None]:
        """Tells the client of a request that its answer is being computed now; nothing once that has begun."""

        def tell() -> None:
            cycle = self.cycle
            answering = cycle is not None and cycle.scope is scope and not cycle.response_started
            if answering and scope["http_version"] == "1.1" and not self.transport.is_closing():
                self.transport.write(PROCESSING)

        return tell

    def on_message_complete(self) -> None:
        self._in_head = True
        self._stop_reading()
        super().on_message_complete()

    def _start_reading(self) -> None:
        self._stop_reading()
        if self.client_timeout_s is not None:
            self._reading = self.loop.call_later(self.client_timeout_s, self._read_too_long)

    def _stop_reading(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None

    def _probe_later(self, delay_s: float) -> None:
        """Probes in delay_s, and then at growing intervals, whether a client that has sent everything is still there.

        A client that has left looks the same until it refuses data. The probe is an interim answer, which all HTTP/1.1
        clients skip, or a piece of the answer itself.
        """
        self._stop_probing()
        self._probing = self.loop.call_later(delay_s, self._probe, delay_s)

    def _probe(self, delay_s: float) -> None:
        self._probing = None
        if self.transport.is_closing():
            return
        waits = not self.pipeline and not self.cycle.response_started
        if waits and self.cycle.scope["http_version"] == "1.1":
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        self._probe_later(min(2 * delay_s, _LAST_PROBE_S))

    def _stop_probing(self) -> None:
        if self._probing is not None:
            self._probing.cancel()
            self._probing = None

    def _stop_writing(self) -> None:
        if self._writing is not None:
            self._writing.cancel()
            self._writing = None

    def _read_too_long(self) -> None:
        self._reading = None
        if self.transport.is_closing():
            return
        answering = self.cycle is not None and not self.cycle.response_complete
        if self.pipeline or (answering and self._in_head):
            # An earlier request over this connection is still answered.
            self._start_reading()
            return
        if answering:
            self.cycle.scope[_ARRIVAL].late = True  # type: ignore[literal-required]
        if not (answering and self.cycle.response_started):
            head = b"content-type: text/plain; charset=utf-8\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"
            self.transport.write(STATUS_LINE[408] + head % len(_TOO_SLOW) + _TOO_SLOW.encode())
        self.transport.close()


def _send_unchunked(cycle: RequestResponseCycle) -> None:
    """Ends an answer of unknown length by closing the connection, as HTTP/1.0 does."""
    send, unknown = cycle.send, False

    async def unchunked(message: Any) -> None:
        nonlocal unknown
        if message["type"] == "http.response.start":
            unknown = not any(name.lower() == b"content-length" for name, _ in message.get("headers", ()))
            if unknown:
                cycle.chunked_encoding, cycle.expected_content_length = False, sys.maxsize
        elif unknown and not message.get("more_body", False):
            cycle.expected_content_length = len(message.get("body", b""))
        await send(message)

    cycle.send = unchunked  # type: ignore[method-assign]  # uvicorn makes the cycle


def bounded_protocol(client_timeout_s: float | None) -> type[BoundedHttpProtocol]:
    """The protocol class with a time limit; uvicorn makes one per connection and passes none of our options."""
    return type("BoundedHttpProtocol", (BoundedHttpProtocol,), {"client_timeout_s": client_timeout_s})
