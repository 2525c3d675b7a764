"""Common code of the endpoints for vectors and scores: texts to input ids, and ids to rows."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from fastapi import Request

from llmc.runtime.server.event_stream import until_gone
from llmc.runtime.text.tokenizer import NoRoom
from llmc.runtime.vector_runs import NO_TOKENS
from llmc.runtime.vector_task import Vector, VectorTask

from . import answers
from .context import ServerContext
from .errors import ApiError
from .prompts import check_chars, context_of
from .refusals import CONTEXT, EMPTY
from .requests import EngineRequest


def task_of(server: ServerContext, *names: str) -> VectorTask:
    """The task of the served model. Raises ApiError if it is none of `names`."""
    server.check_ready()
    server.check_task(*names)
    assert server.engine.vector_task is not None
    return server.engine.vector_task


def most_of(server: ServerContext, truncate: int | None) -> int | None:
    """Most tokens of a text for truncate_prompt_tokens; -1: as many as fit."""
    if truncate is None:
        return None
    longest = server.engine.limit.longest_prompt
    return longest if truncate == -1 else min(truncate, longest)


async def encoded(
    server: ServerContext, texts: Sequence[str], make: Callable[[], list[list[int]]], param: str
) -> list[list[int]]:
    """Input ids that `make` returns for `texts`, checked against the engine's limits. Raises ApiError, RequestError."""
    for text in texts:
        check_chars(server, text)
    try:
        found = await server.lanes.run(make, sum(map(len, texts)))
    except NoRoom as error:
        raise ApiError(str(error), param="truncate_prompt_tokens", code="invalid_value") from error
    for index, ids in enumerate(found):
        check_ids(server, index, ids, param)
    return found


def check_ids(server: ServerContext, index: int, ids: Sequence[int], param: str) -> None:
    """Raises ApiError for ids that the engine cannot take."""
    if not ids:
        raise ApiError(f"{param} {index} has no tokens: give at least one", param=param, code=EMPTY)
    longest = server.engine.limit.longest_prompt
    if len(ids) > longest:
        raise ApiError(
            f"{context_of(server.engine)}, and {param} {index} has {len(ids)}: shorten it, or set "
            f"truncate_prompt_tokens to at most {longest} ({CONTEXT})",
            param=param,
            code=CONTEXT,
        )


async def rows_of(
    server: ServerContext, request: Request, ids: Sequence[Sequence[int]], answer_id: str, priority: int | None
) -> list[Vector]:
    """The model's output for each input. Raises as `answers.gather` does."""
    task = server.engine.vector_task
    assert task is not None
    deadline_s = answers.deadline_of(server, request)
    requests = [
        EngineRequest(
            request_id=answer_id if len(ids) == 1 else f"{answer_id}-{index}",
            prompt_token_ids=tuple(one),
            params=NO_TOKENS,
            priority=priority or 0,
            deadline_s=deadline_s,
            index=index,
            vector_width=task.width,
        )
        for index, one in enumerate(ids)
    ]
    streams = answers.submit(server, requests)
    gathered = asyncio.gather(*(answers.gather(stream) for stream in streams))
    await until_gone(request, lambda: answers.close_all(streams), gathered)
    return [stream.vector for stream in streams if stream.vector is not None]


def usage_of(ids: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Usage in the form of OpenAI's embeddings."""
    tokens = sum(map(len, ids))
    return {"prompt_tokens": tokens, "total_tokens": tokens}
