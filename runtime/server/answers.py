"""Shared by both generating endpoints: atomic submission, collecting answers, and reporting early ends as errors."""

from __future__ import annotations

import math
import uuid
from collections.abc import Callable, Sequence
from typing import Any

from fastapi import Request

from llmc.runtime.gathered import Gathered
from llmc.runtime.guided.constraint import Guided
from llmc.runtime.guided.shared_guides import Guide
from llmc.runtime.outputs import CompletionOutput, TokenDelta
from llmc.runtime.request_error import RequestError
from llmc.runtime.server.request_stream import RequestStream

from .context import ServerContext
from .errors import ApiError, draining
from .refusals import CONSTRAINT
from .requests import EngineRequest, RequestFailed

# Values per token with a logprob: the token, the number, the bytes.
_VALUES_AN_ENTRY = 3


def new_id(prefix: str, separator: str = "-") -> str:
    """A new id for an answer."""
    return f"{prefix}{separator}{uuid.uuid4().hex}"


def deadline_of(server: ServerContext, request: Request) -> float | None:
    """Time limit of a request in seconds: the server's, or less if X-Request-Timeout says so. Raises ApiError."""
    limit = server.config.request_timeout_s
    given = request.headers.get("x-request-timeout")
    if given is None:
        return limit
    try:
        asked = float(given)
    except ValueError:
        asked = math.nan
    if not 0 < asked < 1e9:
        raise ApiError(f"X-Request-Timeout is {given!r}: give seconds above 0", code="invalid_value")
    return asked if limit is None else min(asked, limit)


def timed_out(way_out: str) -> ApiError:
    """The answer to a request that reached its time limit. way_out: what makes such a request shorter."""
    raise_it = "raise X-Request-Timeout, or --request-timeout of the server"
    message = f"the request took longer than its timeout: {way_out}, or {raise_it}"
    # A client that retries would wait as long again.
    return ApiError(message, status=408, code="request_timeout", headers={"X-Should-Retry": "false"})


async def guide_maker(server: ServerContext, guided: Guided | None) -> Callable[[], Guide] | None:
    """Compiles a constraint off the event loop. Raises ApiError, and RequestError if the model cannot be guided."""
    if guided is None:
        return None
    compiler = await server.guide_compiler()
    try:
        return await server.lanes.compile(lambda: compiler.compile(guided), len(guided.source))
    except RequestError as error:
        raise ApiError(str(error), code=CONSTRAINT) from error


def submit(server: ServerContext, requests: Sequence[EngineRequest], *, streams: bool = False) -> list[RequestStream]:
    """Submits all requests; if one is refused, submits none and raises its error, or MemoryRefused.

    streams: the answer is sent as it comes, and not kept.
    """
    server.reserve_memory(requests, streams=streams)
    return server.engine.batch(requests)


def close_all(streams: Sequence[RequestStream]) -> None:
    """Cancels running requests."""
    for stream in streams:
        stream.close()


async def gather(stream: RequestStream) -> Gathered:
    """Waits for the complete answer to one prompt. Raises RequestFailed, and ApiError for an early end."""
    gathered = None
    async for delta in stream:
        check_end(delta)
        # Created on first use: in a large batch most prompts are waiting.
        gathered = gathered or Gathered(stream.request.params)
        gathered.add(delta)
    stream.release()
    return gathered or Gathered(stream.request.params)


def size_of(gathered: Sequence[Gathered], alternatives: int | None, prompt_alternatives: int | None) -> int:
    """Approximate number of values in an answer, for `json_response`. None: without logprobs."""
    num_output = sum(one.num_tokens for one in gathered)
    num_prompt = sum(len(one.prompt_logprobs or ()) for one in gathered)
    return num_values(num_output, alternatives) + num_prompt * _VALUES_AN_ENTRY * (1 + (prompt_alternatives or 0))


def num_values(num_output_tokens: int, alternatives: int | None) -> int:
    """As `size_of`, for a number of tokens."""
    return num_output_tokens * (1 if alternatives is None else _VALUES_AN_ENTRY * (1 + alternatives))


def check_end(delta: TokenDelta) -> None:
    """Raises RequestFailed or ApiError if an answer ended before it was complete."""
    if delta.error is not None:
        raise RequestFailed(delta.error)
    if delta.finish_reason == "timeout":
        raise timed_out("ask for fewer tokens")
    if delta.finish_reason == "cancelled":
        raise draining("the server shut down before the answer was complete")


def end_of(finish: TokenDelta | CompletionOutput, reason: str | None) -> dict[str, Any]:
    """The fields that state how a choice ended. reason: its name in this API."""
    told: dict[str, Any] = {"finish_reason": reason, "stop_reason": finish.stop_reason}
    if finish.finish_detail is not None:
        told["finish_detail"] = finish.finish_detail
    return told
