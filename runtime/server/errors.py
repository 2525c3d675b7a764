"""Errors in OpenAI's shape: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from llmc.runtime.binding.handle import LlmcError
from llmc.runtime.images.image_error import ImageError, NoImages
from llmc.runtime.request_error import RequestError
from llmc.runtime.text.chat_template import ChatTemplateError
from llmc.runtime.text.tokenizer import TokenizerError

from .http_protocol import arrived_late
from .refusals import IMAGE, NO_IMAGES
from .request_memory import MemoryRefused
from .requests import ClientGone, QueueFull, RequestFailed, ServerStopping

_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
_MAX_MESSAGE_CHARS = 500
DRAINING_RETRY_S = 5


class ApiError(Exception):
    """A request answered with an error. param: the field at fault. code: a word for programs."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code, self.headers = status, param, code, dict(headers or {})

    def body(self) -> dict[str, Any]:
        """JSON object of the answer."""
        kind = "server_error" if self.status >= 500 else _TYPES.get(self.status, "invalid_request_error")
        message = str(self)
        # Enough for any of our messages; they may quote what a client sent.
        if len(message) > _MAX_MESSAGE_CHARS:
            message = message[: _MAX_MESSAGE_CHARS - 3] + "..."
        return {"error": {"message": message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        """The answer."""
        # A request may hold half a surrogate pair, which cannot be encoded.
        body = json.dumps(self.body(), ensure_ascii=False).encode("utf-8", "backslashreplace")
        return Response(body, self.status, self.headers, "application/json")


def as_api_error(error: Exception) -> ApiError:
    """What to tell a client about an error of the runtime. Any unknown error is a 500 without details."""
    match error:
        case ApiError():
            return error
        case ImageError():
            return ApiError(str(error), param="messages", code=IMAGE)
        case NoImages():
            why = "this server sees no images: start it with --images, for a model that was compiled with --images"
            return ApiError(why, param="messages", code=NO_IMAGES)
        case RequestError():
            return ApiError(str(error), param=_param_of(str(error)), code="invalid_value")
        case ChatTemplateError():
            return ApiError(str(error), code="chat_template")
        case TokenizerError():
            return ApiError(str(error), code="unsupported_model_feature")
        case QueueFull():
            headers = {"Retry-After": str(error.retry_after_s)}
            return ApiError(str(error), status=429, code="queue_full", headers=headers)
        case ClientGone() | ClientDisconnect():
            return ApiError("the client closed the connection", status=499, code="client_gone")
        case ServerStopping():
            return ApiError(str(error), status=503, code="draining", headers={"Retry-After": str(DRAINING_RETRY_S)})
        case RequestFailed() if error.failure.code == "draining":
            return draining(str(error))
        case RequestFailed():
            refused = error.failure.code in ("invalid_argument", "empty_mask", "guide")
            return ApiError(str(error), status=400 if refused else 500, code=error.failure.code)
        case LlmcError() if error.name == "not_found":
            # An adapter that was unloaded since the request began.
            return ApiError(str(error), status=404, param="model", code="model_not_found")
        case LlmcError():
            refused = error.name in ("invalid_argument", "out_of_range")
            return ApiError(str(error), status=400 if refused else 500, code=error.name)
        case MemoryRefused():
            return ApiError(
                error.detail, status=error.status_code, param=error.param, code=error.code, headers=error.headers
            )
        case HTTPException():
            return ApiError(str(error.detail), status=error.status_code, headers=error.headers)
        case RequestValidationError():
            return _validation_error(error)
    return ApiError("internal error: the server's log says more", status=500, code="internal_error")


def draining(message: str) -> ApiError:
    """The answer while the server shuts down: the client may ask another server over a new connection."""
    headers = {"Retry-After": str(DRAINING_RETRY_S), "Connection": "close"}
    return ApiError(message, status=503, code="draining", headers=headers)


def no_valid_key() -> ApiError:
    """The answer to a client without a known API key."""
    return ApiError(
        "no valid API key: send one as Authorization: Bearer KEY",
        status=401,
        code="invalid_api_key",
        headers={"WWW-Authenticate": "Bearer"},
    )


def install(app: FastAPI) -> None:
    """Makes `app` answer every exception in OpenAI's shape."""

    async def handle(request: Request, error: Exception) -> Response:
        if isinstance(error, RequestValidationError) and any(one["loc"][0] == "body" for one in error.errors()):
            kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
            if kind != "application/json" and not kind.endswith("+json"):
                message = f"the content type is {kind or 'missing'}: send JSON with Content-Type: application/json"
                return ApiError(message, status=415, code="unsupported_media_type").response()
        if isinstance(error, ClientDisconnect) and arrived_late(request.scope):
            return ApiError("the request took too long to arrive", status=408, code="request_timeout").response()
        return as_api_error(error).response()

    known = (ApiError, RequestError, ChatTemplateError, TokenizerError, QueueFull, ServerStopping, RequestFailed)
    for kind in (*known, ClientGone, ClientDisconnect, LlmcError, HTTPException, RequestValidationError, Exception):
        app.add_exception_handler(kind, handle)


def _param_of(message: str) -> str | None:
    """The field that a RequestError from SamplingParams starts with."""
    word = message.split(" ", 1)[0]
    return word if word in _FIELDS else None


_FIELDS = frozenset(
    {"n", "max_tokens", "min_tokens", "top_k", "top_p", "min_p", "temperature", "repetition_penalty"}
    | {"presence_penalty", "frequency_penalty", "seed", "logprobs", "prompt_logprobs", "stop", "stop_token_ids"}
    | {"logit_bias", "messages", "tools"}
)


def _validation_error(error: RequestValidationError) -> ApiError:
    first = error.errors()[0]
    where = [str(part) for part in first["loc"][1:]]  # behind the place: the body, or the query
    if first["type"] == "json_invalid":
        why = first.get("ctx", {}).get("error", "not JSON")
        position = f" at character {where[0]}" if where else ""
        return ApiError(f"the body is not valid JSON: {why}{position}", code="invalid_json")
    # Names of a union's branches do not help the caller.
    param = ".".join(part for part in where if part.isidentifier() or part.isdigit()) or None
    what = first["msg"].removeprefix("Value error, ").replace(" after validation", "")
    what = what[:1].lower() + what[1:]
    if param is None and first["type"] == "missing":
        return ApiError("the body is missing: send a JSON object", code="invalid_value")
    if param is None and first["type"] in ("model_type", "dict_type", "model_attributes_type"):
        what = "give a JSON object"
    told = ("missing", "value_error", "too_short", "too_long")  # their texts name the value, or there is none
    shown = "" if first["type"] in told else f", not {_short(first.get('input'))}"
    code = first["type"] if first["type"] == "unsupported_parameter" else "invalid_value"
    return ApiError(f"{param or 'the body'}: {what}{shown}", param=param, code=code)


def _short(value: object) -> str:
    """A value as its sender wrote it, about."""
    try:
        text = json.dumps(value)
    except (TypeError, ValueError):
        text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
