"""APIs whose answers a router continues elsewhere: how their streams end, and how they report errors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from llmc.runtime.server.errors import ApiError
from llmc.runtime.server.message_errors import error_event

_REFUSED = ApiError("a replica refused the rest of the answer", status=502, code="replica_refused")


@dataclass(frozen=True)
class StreamError:
    """An error that ended a stream. own: it is the replica's own, so that another one may continue."""

    code: str
    own: bool


class Dialect(Protocol):
    """Streams of one API. prefix: of the ids of its answers."""

    prefix: str
    done: bytes
    """The last event; empty: a stream ends with its last choice, or with an error."""

    def error_in(self, event: bytes) -> StreamError | None:
        """The error that an event reports; None for all other events."""

    def error_event(self, error: ApiError, num_events: int) -> bytes:
        """An error of the router, for a client that has num_events events."""

    def refusal_event(self, body: bytes, num_events: int) -> bytes:
        """As `error_event`, of an error that a replica answered with. A proxy before it may have answered instead, with
        any bytes."""


class _Chunks:
    """Chat and completions: events without a name, and [DONE] behind them."""

    done = b"data: [DONE]\n\n"

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix

    def error_in(self, event: bytes) -> StreamError | None:
        if not event.startswith(b'data: {"error"'):
            return None
        error = _data_of(event)["error"]
        return StreamError(str(error.get("code")), error.get("type") == "server_error")

    def error_event(self, error: ApiError, num_events: int) -> bytes:
        return _event(error.body())

    def refusal_event(self, body: bytes, num_events: int) -> bytes:
        told = _refusal_in(body)
        return self.error_event(_REFUSED, num_events) if told is None else _event(told)


class _Messages:
    """Anthropic's."""

    prefix, done = "msg_", b""

    def error_in(self, event: bytes) -> StreamError | None:
        if not event.startswith(b"event: error\n"):
            return None
        error = _data_of(event)["error"]
        return StreamError(str(error.get("code")), error.get("type") in ("api_error", "overloaded_error"))

    def error_event(self, error: ApiError, num_events: int) -> bytes:
        return _named(error_event(error))

    def refusal_event(self, body: bytes, num_events: int) -> bytes:
        told = _refusal_in(body)
        return self.error_event(_REFUSED, num_events) if told is None else _named({**told, "type": "error"})


class _Responses:
    """OpenAI's newer API, whose events are numbered. The router does not know the response that
    `response.failed` repeats, so it ends streams with the event `error`."""

    prefix, done = "resp_", b""

    def error_in(self, event: bytes) -> StreamError | None:
        if not event.startswith(b"event: response.failed\n"):
            return None
        code = str(_data_of(event)["response"]["error"]["code"])
        return StreamError(code, code == "server_error")

    def error_event(self, error: ApiError, num_events: int) -> bytes:
        return self._event(error.body()["error"], num_events)

    def refusal_event(self, body: bytes, num_events: int) -> bytes:
        told = _refusal_in(body)
        return self.error_event(_REFUSED, num_events) if told is None else self._event(told["error"], num_events)

    @staticmethod
    def _event(error: Mapping[str, Any], num_events: int) -> bytes:
        told = {name: error.get(name) for name in ("code", "message", "param")}
        return _named({"type": "error", **told, "sequence_number": num_events})


DIALECTS: Mapping[str, Dialect] = {
    "/v1/chat/completions": _Chunks("chatcmpl-"),
    "/v1/completions": _Chunks("cmpl-"),
    "/v1/messages": _Messages(),
    "/v1/responses": _Responses(),
}
"""By path."""


def _refusal_in(body: bytes) -> dict[str, Any] | None:
    """The JSON of an error, which has its object `error`; None for any other bytes."""
    try:
        told = json.loads(body)
    except (ValueError, RecursionError):
        return None
    return told if isinstance(told, dict) and isinstance(told.get("error"), dict) else None


def _data_of(event: bytes) -> Any:
    return json.loads(event[event.index(b"data: ") + len(b"data: ") :])


def _event(data: Mapping[str, Any]) -> bytes:
    return b"data: " + json.dumps(data).encode() + b"\n\n"


def _named(data: Mapping[str, Any]) -> bytes:
    return b"event: " + str(data["type"]).encode() + b"\n" + _event(data)
