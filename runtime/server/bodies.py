"""JSON request bodies: bounded before parsing, and parsed where they block nobody.

Parsing holds the GIL, and thus blocks the engine's thread. So a body's contents are counted first, without the GIL;
within the bounds, parsing takes at most about 20 ms. Large bodies are parsed one at a time, off the event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any

import numpy as np
import pydantic_core
from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError

from .errors import ApiError

MAX_DEPTH = 128
MAX_VALUES = 1 << 19
# Lists, objects and their keys cost more than numbers.
MAX_PARTS = 1 << 15
# Smaller bodies are parsed on the event loop: a handover costs more.
_SMALL_BODY = 1 << 15
_QUOTE, _COMMA, _COLON, _OPEN_LIST, _CLOSE_LIST, _OPEN_OBJECT, _CLOSE_OBJECT = b'",:[]{}'


@dataclass(frozen=True)
class Size:
    """Size of a JSON text: nesting depth; lists, objects and keys; commas outside strings plus 1."""

    depth: int
    num_parts: int
    num_values: int


def size_of(body: bytes) -> Size:
    """Sizes of any bytes, correct for valid JSON. Takes a few ms per MiB, mostly without the GIL."""
    if b"\\" in body:
        body = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    text = np.frombuffer(body, np.uint8)
    # An odd number of preceding quotes means that a character is inside a string.
    structure = text[(np.cumsum(text == _QUOTE, dtype=np.uint8) & 1) == 0]
    opened = (structure == _OPEN_LIST) | (structure == _OPEN_OBJECT)
    closed = (structure == _CLOSE_LIST) | (structure == _CLOSE_OBJECT)
    depth = np.cumsum(opened.astype(np.int8) - closed.astype(np.int8), dtype=np.int32)
    return Size(
        int(depth.max(initial=0)),
        int(np.count_nonzero(opened)) + int(np.count_nonzero(structure == _COLON)),
        int(np.count_nonzero(structure == _COMMA)) + 1,
    )


def check_size(body: bytes) -> None:
    """Raises ApiError for JSON nested deeper than MAX_DEPTH, or of more than MAX_VALUES values or MAX_PARTS parts.

    Invalid JSON may pass: the parser reports it.
    """
    if len(body) < _SMALL_BODY and body.count(b"[") + body.count(b"{") <= MAX_DEPTH:
        return
    size = size_of(body)
    why = None
    if size.depth > MAX_DEPTH:
        why = f"nests {size.depth} deep: at most {MAX_DEPTH} levels are read, make it flatter"
    elif size.num_parts > MAX_PARTS:
        why = f"has {size.num_parts} lists, objects and keys: at most {MAX_PARTS} are read, send less"
    elif size.num_values > MAX_VALUES:
        why = f"has {size.num_values} values: at most {MAX_VALUES} are read, send less"
    if why is not None:
        raise ApiError(f"the body {why}", code="invalid_json")


def parse(model: type[BaseModel], body: bytes) -> BaseModel:
    """The request in `body`. Raises ApiError, and RequestValidationError if the model rejects it."""
    check_size(body)
    try:
        data = pydantic_core.from_json(body, cache_strings="keys")
    except ValueError as error:
        why = _one_line(error)
        # The library's words for half a surrogate pair speak of the escape's end.
        hint = ": half a surrogate pair is not a character, send both halves" if "hex escape" in why else ""
        raise ApiError(f"the body is not valid JSON: {why}{hint}", code="invalid_json") from error
    try:
        return model.model_validate(data)
    except ValidationError as error:
        found = [{**one, "loc": ("body", *one["loc"])} for one in error.errors(include_url=False)]
        raise RequestValidationError(found) from error


def declared_size(request: Request) -> int:
    """The body size stated in a request's headers; a large number if not stated."""
    declared = request.headers.get("content-length", "")
    return int(declared) if declared.isdecimal() else _SMALL_BODY


class JsonRoute(APIRoute):
    """A route that parses JSON bodies itself, and passes FastAPI the declared model.

    lane: the single thread that parses large bodies; set by `json_route`.
    """

    lane: Executor

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """As FastAPI asks for it."""
        handle = super().get_route_handler()
        model = None if self.body_field is None else self.body_field.field_info.annotation
        if not (isinstance(model, type) and issubclass(model, BaseModel)):
            return handle
        declared = model

        async def read(request: Request) -> Response:
            kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
            if kind == "application/json" or kind.endswith("+json"):
                body = await request.body()
                if body:
                    request = _Parsed(request, await self._parsed(declared, body))
            return await handle(request)

        return read

    async def _parsed(self, model: type[BaseModel], body: bytes) -> BaseModel:
        if len(body) < _SMALL_BODY:
            return parse(model, body)
        return await asyncio.get_running_loop().run_in_executor(self.lane, parse, model, body)


def json_route(lane: Executor) -> type[JsonRoute]:
    """The route class for APIRouter(route_class=…), which passes no options of ours on."""
    return type("JsonRoute", (JsonRoute,), {"lane": lane})


class _Parsed(Request):
    """A request whose body is parsed already."""

    def __init__(self, request: Request, body: BaseModel) -> None:
        super().__init__(request.scope, request.receive)
        self._parsed_body = body

    async def body(self) -> bytes:
        """Not empty, which FastAPI would take for no body."""
        return b"{}"

    async def json(self) -> Any:
        """The model, which validates as itself."""
        return self._parsed_body


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]
