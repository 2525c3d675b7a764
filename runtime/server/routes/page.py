"""The live page at /, and the state and the timelines of requests that it reads."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from ..page_files import PageFile, read_page_files
from ..state import LiveState
from ..timelines import Timelines

# No inline code, nothing from other hosts, no embedding in a frame.
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def router(live: LiveState, timelines: Timelines) -> APIRouter:
    """The endpoints; the files need no API key, the state and the timelines do when one is set."""
    routes = APIRouter(tags=["page"])
    for file in read_page_files():
        routes.add_api_route(file.path, _sender(file), include_in_schema=False)

    @routes.get("/v1/llmc/state")
    async def state(quantiles: bool = False) -> dict[str, Any]:
        """Running requests (no text), counters, latencies and the use of every bucket. quantiles: with those of the
        latencies, from which a router makes the state of several servers."""
        return live.snapshot(quantiles=quantiles)

    @routes.get("/v1/llmc/requests")
    async def requests() -> dict[str, Any]:
        """Requests that run and the last that ended (no text): when they waited, computed, drew, were preempted."""
        return timelines.snapshot()

    return routes


def _sender(file: PageFile) -> Callable[[Request], Awaitable[Response]]:
    headers = {**_HEADERS, "ETag": file.etag}

    async def send(request: Request) -> Response:
        if request.headers.get("if-none-match") == file.etag:
            return Response(status_code=304, headers=headers)
        return Response(file.content, headers={**headers, "Content-Type": file.media_type})

    return send
