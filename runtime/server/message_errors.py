"""Errors of /v1/messages in Anthropic's shape: {"type": "error", "error": {"type", "message"}, "request_id"}.

The error also has a `code`, like those of the other endpoints.

It is a middleware because an error may come from any layer: keys, hosts, limits, routes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI
from starlette.datastructures import MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .errors import ApiError, as_api_error
from .refusals import CONTEXT

PREFIX = "/v1/messages"
_TYPES: Mapping[int, str] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def install(app: FastAPI) -> None:
    """Adds the middleware."""
    app.add_middleware(MessageErrors)


def response_of(error: ApiError, path: str) -> Response:
    """The answer to a request of `path`, in the shape of its API. The error's headers have the request id."""
    request_id = error.headers.get("X-Request-Id")
    if not _is_message(path):
        return error.response()
    headers = {**error.headers, **({} if request_id is None else {"request-id": request_id})}
    body = _bytes_of(error.status, error.body()["error"], request_id)
    return Response(body, error.status, headers, "application/json")


def _is_message(path: str) -> bool:
    return path == PREFIX or path.startswith(f"{PREFIX}/")


def error_body(status: int, error: Mapping[str, Any], request_id: str | None) -> dict[str, Any]:
    """The JSON of an error. error: the object of OpenAI's shape."""
    message = str(error["message"])
    if error.get("code") == CONTEXT:
        # Error types that clients look for.
        asked_too_much = error.get("param") == "max_tokens"
        why = "input length and `max_tokens` exceed context limit" if asked_too_much else "prompt is too long"
        message = f"{why}: {message}"
    kind = _TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    told = {"type": kind, "message": message, "code": error.get("code")}
    return {"type": "error", "error": told, "request_id": request_id}


def _bytes_of(status: int, error: Mapping[str, Any], request_id: str | None) -> bytes:
    """`error_body`, of which half a surrogate pair cannot be encoded."""
    return json.dumps(error_body(status, error, request_id), ensure_ascii=False).encode("utf-8", "backslashreplace")


class MessageErrors:
    """Rewrites errors, and also sends the request id in the header that Anthropic's clients read."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not _is_message(scope["path"]):
            await self._app(scope, receive, send)
            return
        answer = _Answer(send)
        try:
            await self._app(scope, receive, answer.send)
        except Exception as error:
            # The layer that would answer it lies outside this one; the log is still written there.
            if not answer.started:
                await as_api_error(error).response()(scope, receive, answer.send)
            raise


class _Answer:
    """Passes an answer on; holds back the body of an error until it is complete."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._start: Message | None = None
        self._body = b""
        self.started = False

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.started = True
            headers = MutableHeaders(scope=message)
            if "x-request-id" in headers:
                headers["request-id"] = headers["x-request-id"]
            if message["status"] >= 400 and headers.get("content-type", "").startswith("application/json"):
                self._start = message
                return
        elif self._start is not None:
            self._body += message.get("body", b"")
            if message.get("more_body"):
                return
            message, start = self._translated(message, self._start)
            await self._send(start)
        await self._send(message)

    def _translated(self, message: Message, start: Message) -> tuple[Message, Message]:
        headers = MutableHeaders(scope=start)
        body = _bytes_of(start["status"], json.loads(self._body)["error"], headers.get("x-request-id"))
        headers["content-length"] = str(len(body))
        self._start = None
        return {**message, "body": body}, start


def error_event(error: ApiError) -> dict[str, Any]:
    """The event that ends a stream."""
    return error_body(error.status, error.body()["error"], None)
