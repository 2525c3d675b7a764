"""What both generating endpoints do: submit all or nothing, gather answers, tell early ends as errors."""

from __future__ import annotations

import math
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from fastapi import Request

from llmc.runtime.guides import Guided
from llmc.runtime.outputs import TokenLogprob

from .context import ServerContext
from .errors import ApiError
from .requests import EngineRequest, Guide
from .stream import RequestStream


@dataclass
class Answer:
    """One continuation, whole."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: str = ""
    stop_reason: str | int | None = None


@dataclass
class Gathered:
    """All continuations of one prompt. prompt_logprobs: one entry a prompt token but the first, when asked for."""

    outputs: list[Answer]
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None
    num_cached_tokens: int = 0

    @property
    def num_tokens(self) -> int:
        return sum(len(output.token_ids) for output in self.outputs)


def new_id(prefix: str) -> str:
    """An id for an answer."""
    return f"{prefix}-{uuid.uuid4().hex}"


def deadline_of(server: ServerContext, request: Request) -> float | None:
    """Seconds a request may take: the server's limit, or less when X-Request-Timeout says so. Raises ApiError."""
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


async def guide_maker(server: ServerContext, guided: Guided | None) -> Callable[[], Guide] | None:
    """Compiles a constraint, aside. Raises RequestError."""
    if guided is None:
        return None
    compiler = await server.guide_compiler()
    return await server.compiled(lambda: compiler.compile(guided))


def submit(server: ServerContext, requests: Sequence[EngineRequest]) -> list[RequestStream]:
    """Submits all requests, or none of them when one is refused, whose error is raised."""
    streams: list[RequestStream] = []
    try:
        for request in requests:
            streams.append(server.engine.stream(request))
    except BaseException:
        close_all(streams)
        raise
    return streams


def close_all(streams: Sequence[RequestStream]) -> None:
    """Cancels what still runs."""
    for stream in streams:
        stream.close()


async def gather(stream: RequestStream) -> Gathered:
    """Waits for the whole answer to one prompt. Raises RequestFailed, and ApiError for an early end."""
    gathered = Gathered([Answer() for _ in range(stream.request.params.n)])
    pieces: list[list[str]] = [[] for _ in gathered.outputs]
    async for delta in stream:
        output = gathered.outputs[delta.output_index]
        pieces[delta.output_index].append(delta.text)
        output.token_ids += delta.token_ids
        output.logprobs += delta.logprobs or ()
        gathered.num_cached_tokens = delta.num_cached_tokens
        if delta.prompt_logprobs is not None:
            gathered.prompt_logprobs = delta.prompt_logprobs
        if delta.finish_reason is not None:
            check_end(delta.finish_reason)
            output.finish_reason, output.stop_reason = delta.finish_reason, delta.stop_reason
    for output, parts in zip(gathered.outputs, pieces, strict=True):
        output.text = "".join(parts)
    return gathered


def check_end(finish_reason: str) -> None:
    """Raises ApiError when an answer ended before it was complete."""
    if finish_reason == "timeout":
        message = "the request took longer than its timeout: ask for fewer tokens, or raise the timeout"
        # A client that tries again would wait as long once more.
        raise ApiError(message, status=408, code="request_timeout", headers={"X-Should-Retry": "false"})
    if finish_reason == "cancelled":
        raise ApiError("the server shut down before the answer was complete", status=503, code="draining")
