"""From a ChatRequest to the engine, for every API that is answered as a chat."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import Request

from llmc.runtime.binding.placed_rows import PlacedRows
from llmc.runtime.images.image_prompt import ImagePrompt
from llmc.runtime.outputs import TokenDelta
from llmc.runtime.server.request_stream import RequestStream

from . import answers
from .chat_output import ChatDelta, ChatOutput
from .context import ServerContext
from .prompts import checked_max_tokens, encode_chat, encode_chat_ids, rest_of_context
from .protocol.chat import ChatRequest
from .protocol.ranking import check_guide
from .requests import EngineRequest
from .tools.plan import ChatPlan, plan_chat


@dataclass(frozen=True)
class PreparedChat:
    """request: ready for submission. make_output: creates the reader of a continuation, by index."""

    request: EngineRequest
    make_output: Callable[[int], ChatOutput]


async def prepare_chat(
    server: ServerContext, body: ChatRequest, request: Request, request_id: str, model: str
) -> PreparedChat:
    """Renders, tokenises and validates. model: from `check_model`. Raises ApiError and RequestError."""
    plan = await _plan(server, body)
    ids, images = await encode_chat(
        server, body.messages, truncate=body.truncate_prompt_tokens, **_rendering(body, plan)
    )
    asked = body.asked_max_tokens
    param = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    if asked is None:
        max_tokens = rest_of_context(server, len(ids))
    else:
        max_tokens = checked_max_tokens(server, asked, len(ids), param)
    guide = plan.guide(await answers.guide_maker(server, plan.guided), ids)
    check_guide(body, guide is not None)
    params = body.sampling(
        server.sampling_defaults(),
        max_tokens=max_tokens,
        logprobs=body.num_logprobs,
        prompt_logprobs=body.prompt_logprobs,
        show_special_tokens=plan.show_special_tokens,
    )
    deadline_s = answers.deadline_of(server, request)
    # Last, since it takes longest: nothing else is left to be refused.
    placed, left_s = await _placed(server, request, images, ids, deadline_s)
    engine_request = EngineRequest(
        request_id=request_id,
        prompt_token_ids=tuple(ids),
        params=params,
        priority=body.priority or 0,
        deadline_s=left_s,
        guide=guide,
        adapter=server.adapter_id(model),
        placed=placed,
    )
    return PreparedChat(engine_request, plan.output(ids, request_id))


async def _placed(
    server: ServerContext, request: Request, images: ImagePrompt, ids: Sequence[int], limit_s: float | None
) -> tuple[Sequence[PlacedRows], float | None]:
    """The rows of a prompt's images, and what they leave of its seconds. Raises as ImageWork, and ApiError for a
    request without time left."""
    begun = time.monotonic()
    try:
        placed = await server.images.placed(request, images, ids, limit_s)
    except TimeoutError as error:
        raise answers.timed_out("give fewer or smaller images") from error
    return placed, None if limit_s is None else max(0.0, limit_s - (time.monotonic() - begun))


async def count_prompt(server: ServerContext, body: ChatRequest) -> int:
    """Tokens of a conversation for the model, even beyond the context. Raises ApiError and RequestError."""
    ids, _ = await encode_chat_ids(server, body.messages, **_rendering(body, await _plan(server, body)))
    return len(ids)


async def _plan(server: ServerContext, body: ChatRequest) -> ChatPlan:
    if body.tools or body.has_constraint:
        return await server.lanes.compile(lambda: plan_chat(server, body))
    return plan_chat(server, body)


def _rendering(body: ChatRequest, plan: ChatPlan) -> dict[str, Any]:
    """Chat template variables besides the messages."""
    return {
        "tools": plan.tools,
        "variables": body.chat_template_kwargs,
        "add_generation_prompt": body.add_generation_prompt is not False,
        "continue_final_message": bool(body.continue_final_message),
        "add_special_tokens": bool(body.add_special_tokens),
    }


async def pieces(
    streams: Sequence[RequestStream], reader: ChatOutput, *, token_by_token: bool = False
) -> AsyncIterator[tuple[TokenDelta, list[ChatDelta]]]:
    """The deltas of one continuation, with the message parts that each settles. Raises as `check_end`.

    streams: one, or none if the client has the whole answer. token_by_token: for what depends on how text is cut.
    """
    for stream in streams:
        async for merged in stream:
            answers.check_end(merged)
            for delta in _one_by_one(merged) if token_by_token else (merged,):
                told = list(reader.push(delta.text, delta.token_ids)) if delta.text or delta.token_ids else []
                if delta.finish_reason is not None:
                    told += reader.finish()
                yield delta, told


def _one_by_one(delta: TokenDelta) -> Iterator[TokenDelta]:
    """A delta for each token; the last one also has the end and its text."""
    count = len(delta.token_ids)
    for index in range(count - 1):
        yield dataclasses.replace(
            delta,
            text=delta.pieces[index],
            token_ids=delta.token_ids[index : index + 1],
            logprobs=None if delta.logprobs is None else delta.logprobs[index : index + 1],
            finish_reason=None,
            pieces=delta.pieces[index : index + 1],
        )
    last = max(0, count - 1)
    yield dataclasses.replace(
        delta,
        text="".join(delta.pieces[last:]),
        token_ids=delta.token_ids[last:],
        logprobs=None if delta.logprobs is None else delta.logprobs[last:],
        pieces=delta.pieces[last:],
    )
