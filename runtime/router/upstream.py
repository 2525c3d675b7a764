"""HTTP/1.1 to a replica: connections are reused, and bodies are read as they come, no faster than they are
forwarded."""

from __future__ import annotations

import asyncio
import socket
import ssl
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from typing import cast

import httptools

from llmc.runtime.address import Address, why_not_connected

from .exhausted import EXHAUSTION, RouterExhausted, why_exhausted

Headers = Sequence[tuple[bytes, bytes]]
_MOST_BUFFERED = 256 << 10
_MOST_IDLE = 64
_MOST_HEAD = 64 << 10
# A host that is gone ends no connection. So the system asks after some idle seconds, then each second, whether it is
# still there, and ends the connection when it has acknowledged nothing for _UNHEARD_S.
_UNHEARD_S = 10
_SIGNS_OF_LIFE = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _UNHEARD_S // 2),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNHEARD_S * 1000),
)


OnInterim = Callable[[int], None]
"""Told the status of an interim answer: 100 to 199."""


class ReplicaLost(Exception):
    """A replica is unreachable, or interrupted an answer. unused: a reused connection ended without any answer."""

    def __init__(self, message: str, *, unused: bool = False) -> None:
        super().__init__(message)
        self.unused = unused


class _Connection(asyncio.Protocol):
    """A connection; one exchange at a time."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self.pieces: deque[bytes] = deque()
        self.complete = self.keeps_alive = False
        self.lost: str | None = None
        self.heard = False
        self.heard_at = time.monotonic()  # or when the exchange began
        self._num_buffered = self._head_bytes = 0
        self._paused = False
        self._waiter: asyncio.Future[None] | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._in_head = True
        self.on_interim: OnInterim | None = None

    def begin(self) -> None:
        """Prepares for the next exchange."""
        self.status, self.headers, self._in_head, self._head_bytes = 0, [], True, 0
        self.on_interim = None
        self.complete = self.keeps_alive = self.heard = False
        self.heard_at = time.monotonic()
        self._parser = httptools.HttpResponseParser(self)

    @property
    def has_head(self) -> bool:
        return not self._in_head

    async def wait(self) -> None:
        """Waits for news."""
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def take(self) -> bytes:
        """The part of the body that has arrived and was not taken."""
        data = self.pieces.popleft() if len(self.pieces) == 1 else b"".join(self.pieces)
        self.pieces.clear()
        self._num_buffered = 0
        if self._paused and self.transport is not None:
            self._paused = False
            self.transport.resume_reading()
        return data

    # --- asyncio.Protocol ---------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is not a subclass of it
        connected = transport.get_extra_info("socket")
        for option in _SIGNS_OF_LIFE:
            connected.setsockopt(*option)

    def data_received(self, data: bytes) -> None:
        self.heard, self.heard_at = True, time.monotonic()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self.lost = f"what it answers is not HTTP: {error}"
            self.abort()
        if self._num_buffered > _MOST_BUFFERED and not self._paused and self.transport is not None:
            self._paused = True
            self.transport.pause_reading()
        self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        if isinstance(exc, TimeoutError):
            self.lost = self.lost or f"nothing was heard of its host for {_UNHEARD_S} s"
        self.lost = self.lost or f"it closed the connection{'' if exc is None else f': {exc}'}"
        self._wake()

    # --- httptools ----------------------------------------------------------------------------------------------

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))
        self._head_bytes += len(name) + len(value)
        if self._head_bytes > _MOST_HEAD:
            self.lost = f"its headers exceed {_MOST_HEAD} bytes"
            self.abort()

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()
        if self.status >= 200:
            self._in_head = False
        else:
            self.headers.clear()
            if self.on_interim is not None:
                self.on_interim(self.status)

    def on_body(self, body: bytes) -> None:
        self.pieces.append(body)
        self._num_buffered += len(body)

    def on_message_complete(self) -> None:
        if not self._in_head:
            self.complete, self.keeps_alive = True, self._parser.should_keep_alive()

    def abort(self) -> None:
        """Closes the connection, which also cancels the replica's work for it."""
        if self.transport is not None:
            self.transport.abort()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class Answer:
    """Status, headers and a body that arrives. Close it at the end; an unread rest is aborted."""

    def __init__(self, upstream: Upstream, connection: _Connection) -> None:
        self._upstream, self._connection = upstream, connection
        self.status, self.headers = connection.status, connection.headers

    def header(self, name: bytes) -> bytes:
        """Last value of a header; empty if missing."""
        return next((value for key, value in reversed(self.headers) if key == name), b"")

    async def pieces(self) -> AsyncIterator[bytes]:
        """The body as it arrives. Raises ReplicaLost when it is interrupted."""
        connection = self._connection
        while True:
            if connection.pieces:
                yield connection.take()
            elif connection.complete:
                return
            elif connection.lost is not None:
                raise ReplicaLost(f"{self._upstream.name}: {connection.lost}")
            else:
                await connection.wait()

    async def body(self) -> bytes:
        """The whole body. Raises ReplicaLost."""
        return b"".join([piece async for piece in self.pieces()])

    def close(self) -> None:
        """Keeps the connection if the answer is complete; may be called twice."""
        connection = self._connection
        self._upstream.release(connection, whole=connection.complete and not connection.pieces)


class Upstream:
    """The connections to one replica. Raises UrlError for an invalid address."""

    def __init__(self, url: str) -> None:
        self.address = Address.parse(url)
        self.name = self.address.authority
        self.url = url
        self.base = self.address.origin + self.address.prefix
        self._tls = ssl.create_default_context() if self.address.tls else None
        self._idle: list[_Connection] = []
        self._busy: set[_Connection] = set()
        self._connecting: set[asyncio.Timeout] = set()

    async def request(
        self, method: str, target: bytes, headers: Headers, body: bytes, on_interim: OnInterim | None = None
    ) -> Answer:
        """Sends a request and waits for the head of its answer. Raises ReplicaLost, and RouterExhausted."""
        lines = [b"%s %s%s HTTP/1.1" % (method.encode(), self.address.prefix.encode(), target)]
        lines.append(b"host: " + self.name.encode())
        lines += [name + b": " + value for name, value in headers]
        if body or method in ("POST", "PUT", "PATCH"):
            lines.append(b"content-length: %d" % len(body))
        message = b"\r\n".join(lines) + b"\r\n\r\n" + body
        while True:
            try:
                return await self._exchange(message, on_interim)
            except ReplicaLost as error:
                # The replica may close a kept connection at the moment of its reuse.
                if not error.unused:
                    raise

    def abort_all(self) -> None:
        """Aborts all running exchanges, those that still connect too, and closes the kept connections."""
        self.abort_silent(0)

    def abort_silent(self, silent_s: float) -> None:
        """As `abort_all`, but for exchanges in which the replica has said something within the last silent_s."""
        while self._connecting:
            self._connecting.pop().reschedule(asyncio.get_running_loop().time())
        since = time.monotonic() - silent_s
        for connection in (*(busy for busy in self._busy if busy.heard_at <= since), *self._idle):
            connection.abort()
        self._idle.clear()

    def release(self, connection: _Connection, *, whole: bool) -> None:
        """Takes a connection back."""
        if connection not in self._busy:
            return
        self._busy.discard(connection)
        if whole and connection.keeps_alive and connection.lost is None and len(self._idle) < _MOST_IDLE:
            self._idle.append(connection)
        else:
            connection.abort()

    async def _exchange(self, message: bytes, on_interim: OnInterim | None) -> Answer:
        connection, kept = await self._connection()
        self._busy.add(connection)
        connection.on_interim = on_interim
        try:
            assert connection.transport is not None
            connection.transport.write(message)
            while not connection.has_head:
                if connection.lost is not None:
                    raise ReplicaLost(f"{self.name}: {connection.lost}", unused=kept and not connection.heard)
                await connection.wait()
            return Answer(self, connection)
        except BaseException:
            self.release(connection, whole=False)
            raise

    async def _connection(self) -> tuple[_Connection, bool]:
        """An open connection, and whether it was used before."""
        while self._idle:
            connection = self._idle.pop()
            if connection.lost is None and connection.transport is not None and not connection.transport.is_closing():
                connection.begin()
                return connection, True
        loop = asyncio.get_running_loop()
        try:
            # Linux tries for two minutes to reach a host that does not answer; `abort_all` ends that.
            async with asyncio.timeout(None) as limit:
                self._connecting.add(limit)
                _, connection = await loop.create_connection(
                    _Connection, self.address.host, self.address.port, ssl=self._tls
                )
        except OSError as error:
            if (lack := why_exhausted(error)) is not None:
                EXHAUSTION.note(lack)
                raise RouterExhausted(lack) from error
            why = why_not_connected(error) or "no connection was made in time"
            raise ReplicaLost(f"{self.name}: {why}") from error
        finally:
            self._connecting.discard(limit)
        return connection, False
