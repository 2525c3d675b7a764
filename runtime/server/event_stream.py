"""Streamed answers, and requests that end when their client disconnects."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

from fastapi import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from llmc.runtime.server.errors import as_api_error
from llmc.runtime.server.json_text import json_of, to_json
from llmc.runtime.server.lanes import Lanes
from llmc.runtime.server.requests import ClientGone

DONE = b"data: [DONE]\n\n"
_Value = TypeVar("_Value")


def sse(data: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + to_json(data) + b"\n\n"


async def large_sse(lanes: Lanes, make: Callable[[], Any], size: int) -> bytes:
    """One server-sent event with the value that `make` returns; built in another thread if large. size: as for
    `json_of`."""
    return b"data: " + await json_of(lanes, make, size) + b"\n\n"


async def named_sse(lanes: Lanes, data: dict[str, Any], size: int = 0) -> bytes:
    """One server-sent event, named by the type of its data. size: as for `json_of`."""
    kind: str = data["type"]
    return b"event: " + kind.encode() + b"\n" + await large_sse(lanes, lambda: data, size)


class EventStream(Response):
    """Sends events as they come. When the client disconnects it calls `close` at once, which must end the iteration."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes], close: Callable[[], None]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gone = asyncio.create_task(_client_gone(receive))
        gone.add_done_callback(lambda _: self._close())
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            try:
                async for event in self._events:
                    await send({"type": "http.response.body", "body": event, "more_body": True})
            except Exception as error:  # the status is sent: the client learns it from an event
                body = as_api_error(error).body()
                await send({"type": "http.response.body", "body": sse(body) + DONE, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            self._close()
            gone.cancel()


async def until_gone(request: Request, close: Callable[[], None], answer: Awaitable[_Value]) -> _Value:
    """The answer. If the client disconnects first, calls `close` and raises ClientGone."""
    gone = asyncio.create_task(_client_gone(request.receive))
    work = asyncio.ensure_future(answer)
    try:
        await asyncio.wait({gone, work}, return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            return work.result()
        raise ClientGone
    finally:
        close()
        gone.cancel()
        work.cancel()
        # Nobody awaits it any more; asyncio would log an exception that nobody retrieves.
        work.add_done_callback(lambda ended: ended.cancelled() or ended.exception())


async def _client_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
