"""A lean asyncio HTTP/1.1 client: timestamps body pieces on arrival, without interpreting them."""

from __future__ import annotations

import asyncio
import ssl
import time
from dataclasses import dataclass, field
from typing import cast

from llmc.runtime.address import Address, why_not_connected

_MAX_HEAD = 64 << 10
Piece = tuple[int, bytes]
"""(time.monotonic_ns() of its arrival, bytes of the body without transfer coding)"""


class HttpError(Exception):
    """A request without a complete answer. cause: "connect", "timeout", "disconnect" or "protocol"."""

    def __init__(self, cause: str, message: str, reply: Reply | None = None) -> None:
        super().__init__(message)
        self.cause = cause
        self.reply = reply


@dataclass
class Reply:
    """A status and the body so far. start_ns: before connecting. end_ns: at the body's last byte.

    left: the client disconnected itself, as requested by `leave_after`.
    """

    start_ns: int
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    pieces: list[Piece] = field(default_factory=list)
    end_ns: int = 0
    left: bool = False

    @property
    def body(self) -> bytes:
        return b"".join(piece for _, piece in self.pieces)


class HttpClient:
    """Keeps connections alive, one per concurrent request; close it at the end.

    headers: sent with every request. timeout_s: for a whole answer.
    """

    def __init__(self, address: Address, headers: dict[str, str] | None = None, timeout_s: float = 3600.0) -> None:
        self._address = address
        self._timeout_s = timeout_s
        self._idle: list[_Connection] = []
        self._tls = ssl.create_default_context() if address.tls else None
        lines = {"Host": address.authority, "Accept": "*/*", **(headers or {})}
        self._head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())

    async def request(self, method: str, path: str, body: bytes | None = None, *, leave_after: int = 0) -> Reply:
        """Sends a request and returns its complete answer, with any status.

        leave_after: disconnect after this many body pieces; 0 for never. Raises HttpError.
        """
        head = f"{method} {self._address.prefix}{path} HTTP/1.1\r\n{self._head}"
        if body is not None:
            head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        message = head.encode("latin-1") + b"\r\n" + (body or b"")
        reply = Reply(time.monotonic_ns())
        while True:
            reused = bool(self._idle)
            connection = self._idle.pop() if reused else await self._connect()
            try:
                async with asyncio.timeout(self._timeout_s):
                    await connection.exchange(message, reply, leave_after)
            except TimeoutError as error:
                connection.abort()
                raise HttpError("timeout", f"no whole answer within {self._timeout_s:g} s", reply) from error
            except HttpError as error:
                connection.abort()
                # A server may close an idle connection just as it is reused; nothing was answered, so retry.
                if reused and error.cause == "disconnect" and not reply.status:
                    continue
                raise
            except BaseException:
                connection.abort()
                raise
            if connection.reusable:
                self._idle.append(connection)
            else:
                connection.abort()
            return reply

    async def close(self) -> None:
        """Closes the idle connections."""
        for connection in self._idle:
            connection.abort()
        self._idle.clear()
        await asyncio.sleep(0)

    async def _connect(self) -> _Connection:
        address, loop = self._address, asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._timeout_s):
                _, connection = await loop.create_connection(_Connection, address.host, address.port, ssl=self._tls)
        except TimeoutError as error:
            raise HttpError("timeout", f"no connection within {self._timeout_s:g} s") from error
        except OSError as error:
            where = f"{address.host}:{address.port}"
            raise HttpError("connect", f"cannot connect to {where}: {why_not_connected(error)}") from error
        return connection


class _Connection(asyncio.Protocol):
    """One exchange at a time. Data is timestamped in the event loop's callback, before any task runs."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._done: asyncio.Future[None] | None = None
        self._open = False
        self._reset(Reply(0), 0)

    def _reset(self, reply: Reply, leave_after: int) -> None:
        self._reply = reply
        self._leave_after = leave_after
        self._buffer = b""
        self._in_body = self._chunked = False
        self._left: int | None = None
        self.reusable = False

    async def exchange(self, message: bytes, reply: Reply, leave_after: int) -> None:
        """Sends `message` and fills `reply` to its end. Raises HttpError."""
        if not self._open or self._transport is None:
            raise HttpError("disconnect", "the server closed the connection")
        self._reset(reply, leave_after)
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(message)
        await self._done

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # Some event loops do not derive transports from asyncio.Transport.
        self._transport, self._open = cast(asyncio.Transport, transport), True

    def connection_lost(self, error: Exception | None) -> None:
        self._open = False
        if self._in_body and not self._chunked and self._left is None:
            self._finish(keep=False)  # this body ends with the connection
        elif self._in_body:
            self._fail("disconnect", "the server closed the connection in the middle of its answer")
        else:
            self._fail("disconnect", "the server closed the connection without an answer")

    def data_received(self, data: bytes) -> None:
        if self._done is None or self._done.done():
            self._open = False
            self.abort()  # unsolicited data: the connection is not trustworthy
            return
        now = time.monotonic_ns()
        data = self._buffer + data if self._buffer else data
        if not self._in_body:
            end = data.find(b"\r\n\r\n")
            if end < 0:
                self._buffer = data
                if len(data) > _MAX_HEAD:
                    self._fail("protocol", f"the answer's head is longer than {_MAX_HEAD} bytes")
                return
            if not self._take_head(data[:end]):
                return
            self._buffer, data = b"", data[end + 4 :]
        self._take_body(now, data)

    def _take_head(self, head: bytes) -> bool:
        status, *lines = head.decode("latin-1").split("\r\n")
        words = status.split(" ", 2)
        if len(words) < 2 or not words[0].startswith("HTTP/1.") or not words[1].isdigit():
            self._fail("protocol", f"the answer is not HTTP: {status[:80]!r}")
            return False
        headers = {}
        for line in lines:
            name, _, value = line.partition(":")
            headers[name.strip().lower()] = value.strip()
        self._reply.status, self._reply.headers = int(words[1]), headers
        self._chunked = headers.get("transfer-encoding", "").lower() == "chunked"
        length = headers.get("content-length")
        if not self._chunked and length is not None:
            if not length.isdigit():
                self._fail("protocol", f"Content-Length is {length[:40]!r}")
                return False
            self._left = int(length)
        self._in_body = True
        return True

    def _take_body(self, now: int, data: bytes) -> None:
        if self._chunked:
            self._take_chunks(now, data)
            return
        if data and self._leaves_with(now, data if self._left is None else data[: self._left]):
            return
        if self._left is not None:
            self._left -= len(data)
            if self._left <= 0:
                self._finish(keep=self._left == 0)

    def _take_chunks(self, now: int, data: bytes) -> None:
        at = 0
        while (line_end := data.find(b"\r\n", at)) >= 0:
            try:
                size = int(data[at:line_end].partition(b";")[0], 16)
            except ValueError:
                self._fail("protocol", f"a chunk's size is {data[at:line_end][:40]!r}")
                return
            if size == 0:
                # Trailers, if any, end in an empty line.
                end = data.find(b"\r\n\r\n", at)
                if end >= 0:
                    self._finish(keep=end + 4 == len(data))
                    return
                break
            start = line_end + 2
            if len(data) < start + size + 2:
                break
            if self._leaves_with(now, data[start : start + size]):
                return
            at = start + size + 2
        self._buffer = data[at:]

    def _leaves_with(self, now: int, piece: bytes) -> bool:
        """Stores a piece; true if it was the last that the client waits for."""
        pieces = self._reply.pieces
        pieces.append((now, piece))
        if len(pieces) != self._leave_after:
            return False
        self._reply.left = True
        self._finish(keep=False)
        return True

    def _finish(self, *, keep: bool) -> None:
        if self._done is not None and not self._done.done():
            self._reply.end_ns = time.monotonic_ns()
            self.reusable = keep and self._open and self._reply.headers.get("connection", "").lower() != "close"
            self._done.set_result(None)

    def _fail(self, cause: str, message: str) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(HttpError(cause, message, self._reply))
