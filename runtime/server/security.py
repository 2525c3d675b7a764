"""Middlewares in front of every route: request ids, API keys, limits on bodies and memory, hosts, CORS.

They are pure ASGI, so that streams are not buffered and disconnects reach the routes.
"""

from __future__ import annotations

import hmac
import re
import uuid
from collections.abc import Sequence

from fastapi import FastAPI
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from llmc.shown import shown

from .api_keys import KnownKeys
from .config import ServerConfig
from .errors import ApiError, no_valid_key
from .hand_over import PATH as HAND_OVER_PATH
from .hosts import AllowedHosts, hosts_of
from .page_files import PAGE_PATHS
from .request_memory import RequestMemory, RequestMemoryMiddleware

# Probes and load balancers have no key, the page asks its reader for one, and hand-overs have a key of their own.
_OPEN_PATHS = frozenset({"/health", "/ready", "/version"}) | PAGE_PATHS | {HAND_OVER_PATH}
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")


def install(app: FastAPI, config: ServerConfig, memory: RequestMemory) -> None:
    """Adds the middlewares; the last one added sees a request first."""
    app.add_middleware(RequestMemoryMiddleware, memory=memory)
    app.add_middleware(BodyLimit, max_bytes=config.max_body_bytes)
    app.add_middleware(PlainBodies)
    if config.hand_over_key is not None:
        app.add_middleware(HandOverKey, key=config.hand_over_key)
    if config.api_keys:
        app.add_middleware(ApiKeys, keys=config.api_keys)
    if config.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(config.allowed_origins),
            allow_methods=list(config.allowed_methods),
            allow_headers=list(config.allowed_headers),
            allow_credentials=config.allow_credentials,
            expose_headers=["X-Request-Id", "Retry-After"],
        )
    app.add_middleware(AllowedHosts, hosts=hosts_of(config))
    app.add_middleware(RequestIds)


class RequestIds:
    """Takes X-Request-Id from the client or makes one, and returns it in the answer."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["X-Request-Id"] = request_id
            await send(message)

        await self._app(scope, receive, send_with_id)


class ApiKeys:
    """Answers 401 unless the client sends one of the keys, as `Authorization: Bearer KEY` or `X-Api-Key: KEY`.

    The key's number is passed on in scope["llmc.key"].
    """

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        self._keys = KnownKeys(keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in _OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        number = self._keys.number(scope["headers"])
        if number is not None:
            scope["llmc.key"] = number
            await self._app(scope, receive, send)
            return
        await no_valid_key().response()(scope, receive, send)


class HandOverKey:
    """Answers 401 on the path of hand-overs unless the caller sends their key, as `Authorization: Bearer KEY`."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self._app, self._key = app, key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] == HAND_OVER_PATH:
            scheme, _, shown = dict(scope["headers"]).get(b"authorization", b"").partition(b" ")
            if scheme.lower() != b"bearer" or not hmac.compare_digest(shown.strip(b" \t"), self._key):
                message = "no valid hand-over key: start routers and servers with the same --hand-over-key"
                error = ApiError(message, status=401, code="invalid_hand_over_key")
                await error.response()(scope, receive, send)
                return
        await self._app(scope, receive, send)


def key_of(scope: Scope) -> int | None:
    """Number of the request's key; None on a server without keys."""
    number: int | None = scope.get("llmc.key")
    return number


class PlainBodies:
    """Answers 415 to a packed body, whose size does not bound what it unpacks to."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        coding = Headers(scope=scope).get("content-encoding", "").strip() if scope["type"] == "http" else ""
        if coding.lower() in ("", "identity"):
            await self._app(scope, receive, send)
            return
        error = ApiError(
            f"the body has the Content-Encoding {shown(coding)}: send it unpacked, without that header",
            status=415,
            code="unsupported_media_type",
            headers={"Accept-Encoding": "identity"},
        )
        await error.response()(scope, receive, send)


class BodyLimit:
    """Answers 413 to bodies above the limit: by their Content-Length, or once that much has arrived."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._message = f"the body is larger than {max_bytes} bytes: send less, or raise --max-body-size"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        declared = Headers(scope=scope).get("content-length", "")
        if declared.isdigit() and int(declared) > self._max_bytes:
            await self._refuse(scope, receive, send)
            return
        received = 0

        async def limited() -> Message:
            nonlocal received
            message = await receive()
            if message["type"] == "http.request":
                received += len(message.get("body", b""))
                if received > self._max_bytes:
                    raise HTTPException(413, self._message)
            return message

        await self._app(scope, limited, send)

    async def _refuse(self, scope: Scope, receive: Receive, send: Send) -> None:
        await ApiError(self._message, status=413).response()(scope, receive, send)
