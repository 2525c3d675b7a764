"""/v1/responses: OpenAI's newer API of one answer, and the answers that are kept."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import WithJsonSchema

from llmc.runtime.server.event_stream import EventStream, named_sse, until_gone
from llmc.runtime.server.request_stream import RequestStream

from .. import answers
from ..bodies import declared_size, json_route
from ..bounds import check_bounds
from ..chat_jobs import PreparedChat, pieces, prepare_chat
from ..context import ServerContext
from ..errors import ApiError, as_api_error
from ..failover import Resumption
from ..json_text import json_of, json_response
from ..logprobs import chat_logprobs
from ..protocol.chat import ChatRequest
from ..protocol.response_items import read_items
from ..protocol.response_requests import ResponseRequest
from ..refusals import CANCEL
from ..response_output import ResponseOutput
from ..response_store import Item, ResponseStore, StoredResponse
from ..security import key_of

_MAX_PAGE = 100
# Fields of the equivalent chat, by their names in this API.
_NAMES = {
    "response_format": "text.format",
    "max_completion_tokens": "max_output_tokens",
    "messages": "input",
    "prompt": "input",
}
_Limit = Annotated[str, WithJsonSchema({"type": "integer", "minimum": 1, "maximum": _MAX_PAGE})]
_Order = Annotated[str, WithJsonSchema({"enum": ["asc", "desc"]})]
_Switch = Annotated[str, WithJsonSchema({"enum": ["false"]})]


def router(server: ServerContext) -> APIRouter:
    """The endpoints; each key sees only the answers it stored."""
    routes = APIRouter(tags=["responses"], route_class=json_route(server.lanes.bodies))
    store = ResponseStore(server.config.max_stored_responses, server.config.max_stored_response_bytes)

    @routes.post("/v1/responses", response_model=None)
    async def create_response(body: ResponseRequest, request: Request) -> Response:
        """One answer to a conversation, which is kept unless store is false."""
        server.check_ready()
        server.check_task("generate")
        model = server.check_model(body.model)
        body.check()
        check_bounds(server.engine, body)
        owner, size = key_of(request.scope), declared_size(request)
        history = store.history(owner, body.previous_response_id)
        keeps = body.store is not False and store.enabled
        failover = body.llmc_failover
        answer_id = answers.new_id("resp", "_") if failover is None else failover.id
        created = int(time.time()) if failover is None else failover.created

        def read() -> tuple[list[Item], ChatRequest]:
            items = read_items(body.input)
            return items, body.chat([*history, *items])

        with _in_our_words():
            items, chat = await server.lanes.run(read, size)
            prepared = await prepare_chat(server, chat, request, answer_id, model)

        async def keep(response: dict[str, Any], size: int) -> None:
            if keeps:
                whole = (*history, *items, *response["output"])
                num_bytes = len(await json_of(server.lanes, lambda: (response, whole), size))
                store.put(StoredResponse(owner, response, items, whole, num_bytes))

        resumption = Resumption(failover, body.num_outputs, redraws=body.wants_logprobs)
        wanted = await server.hand_over.prepare(request, resumption.engine_requests([prepared.request]))
        streams = answers.submit(server, wanted)
        job = _Job(server, body, model, created, prepared, size, keeps, keep, resumption, streams)
        close = partial(answers.close_all, streams)
        if body.stream:
            return EventStream(job.told(), close)
        response = await until_gone(request, close, job.answer())
        return await json_response(server.lanes, lambda: response, job.size_of(response))

    @routes.get("/v1/responses/{response_id}")
    async def retrieve_response(response_id: str, request: Request, stream: _Switch = "false") -> dict[str, Any]:
        """A kept answer."""
        if stream.lower() not in ("false", "0"):
            why = "stream is set, but a kept answer is not told as events: leave it out"
            raise ApiError(why, param="stream", code="unsupported_parameter")
        return store.get(key_of(request.scope), response_id).response

    @routes.delete("/v1/responses/{response_id}")
    async def delete_response(response_id: str, request: Request) -> dict[str, Any]:
        """Forgets a kept answer; those that went on from it stay whole."""
        store.delete(key_of(request.scope), response_id)
        return {"id": response_id, "object": "response", "deleted": True}

    @routes.post("/v1/responses/{response_id}/cancel")
    async def cancel_response(response_id: str, request: Request) -> dict[str, Any]:
        """Refused: a kept answer is complete, and one that is being made ends with its connection."""
        store.get(key_of(request.scope), response_id)
        why = "only answers made in the background can be cancelled: close the connection of one that is being made"
        raise ApiError(why, param="response_id", code=CANCEL)

    @routes.get("/v1/responses/{response_id}/input_items")
    async def list_input_items(
        response_id: str, request: Request, limit: _Limit = "20", order: _Order = "desc", after: str | None = None
    ) -> dict[str, Any]:
        """The items of the request that a kept answer answers, the last one first unless order is asc."""
        stored = store.get(key_of(request.scope), response_id)
        return _page(stored.input_items, limit, order, after)

    return routes


def _page(items: Sequence[Item], limit: str, order: str, after: str | None) -> dict[str, Any]:
    if order not in ("asc", "desc"):
        raise ApiError(f"order is {order[:80]!r}: use asc or desc", param="order", code="invalid_value")
    if not limit.isdecimal() or len(limit) > 3 or not 1 <= int(limit) <= _MAX_PAGE:
        why = f"limit is {limit[:80]!r}: use a whole number from 1 to {_MAX_PAGE}"
        raise ApiError(why, param="limit", code="invalid_value")
    listed = list(items) if order == "asc" else list(reversed(items))
    if after is not None:
        start = next((place + 1 for place, item in enumerate(listed) if item["id"] == after), None)
        if start is None:
            raise ApiError(f"after is {after[:80]!r}: give the id of an item", param="after", code="invalid_value")
        listed = listed[start:]
    page = listed[: int(limit)]
    ends = {"first_id": page[0]["id"] if page else None, "last_id": page[-1]["id"] if page else None}
    return {"object": "list", "data": page, **ends, "has_more": len(page) < len(listed)}


@contextlib.contextmanager
def _in_our_words() -> Iterator[None]:
    """Renames the chat's fields in errors to those that the client sent."""
    try:
        yield
    except ApiError as error:
        ours = _NAMES.get(error.param or "")
        if ours is None:
            raise
        message = str(error) if error.param in ("prompt", "messages") else str(error).replace(error.param or "", ours)
        raise ApiError(message, status=error.status, param=ours, code=error.code, headers=error.headers) from error


@dataclass
class _Job:
    """One HTTP request, and how its answer is sent.

    num_bytes: of the request's body, much of which is sent back. keep: stores the complete answer; its argument is the
    approximate size. streams: of the engine; one, or none if the client has all.
    """

    server: ServerContext
    body: ResponseRequest
    model: str
    created: int
    prepared: PreparedChat
    num_bytes: int
    keeps: bool
    keep: Callable[[dict[str, Any], int], Awaitable[None]]
    resumption: Resumption
    streams: Sequence[RequestStream]

    async def answer(self) -> dict[str, Any]:
        """The JSON of an answer that does not stream."""
        response: dict[str, Any] = {}
        async for events, _ in self._events():
            for event in events:
                response = event.get("response", response)
        return response

    async def told(self) -> AsyncIterator[bytes]:
        """The events of a streamed answer; an error becomes the event response.failed."""
        number = self.resumption.num_events
        try:
            async for events, comment in self._events():
                texts = []
                for place, event in enumerate(events, number):
                    size = self.size_of(event["response"]) if "response" in event else 0
                    texts.append(await named_sse(self.server.lanes, {**event, "sequence_number": place}, size))
                number += len(texts)
                if texts or comment:
                    yield b"".join(texts) + comment
        except Exception as error:  # the status is sent: the client learns it from an event
            told = as_api_error(error)
            code = "server_error" if told.status >= 500 else told.code
            failed = self._response("failed", error={"code": code, "message": told.body()["error"]["message"]})
            event = {"type": "response.failed", "response": failed, "sequence_number": number}
            yield await named_sse(self.server.lanes, event, self.num_bytes)

    def size_of(self, response: Mapping[str, Any]) -> int:
        """Approximate number of values in an answer, for `json_response`."""
        num_tokens = (response["usage"] or {}).get("output_tokens", 0)
        alternatives = (self.body.top_logprobs or 0) if self.body.wants_logprobs else None
        return self.num_bytes + answers.num_values(num_tokens, alternatives)

    async def _events(self) -> AsyncIterator[tuple[list[dict[str, Any]], bytes]]:
        """Events that belong together, and the comment behind them."""
        body, resumption = self.body, self.resumption
        output, count = ResponseOutput(self.prepared.request.request_id), _TokenCount(self.server)
        if not resumption.begun:
            started = self._response("in_progress")
            kinds = ("response.created", "response.in_progress")
            yield [{"type": kind, "response": started} for kind in kinds], resumption.head
        # Each token's logprobs are told with the text that it settles.
        async for delta, told in pieces(self.streams, self.prepared.make_output(0), token_by_token=body.wants_logprobs):
            count.add(delta.token_ids, delta.num_cached_tokens)
            if body.wants_logprobs and delta.logprobs:
                output.wait(chat_logprobs(self.server.token_texts, delta.logprobs)["content"])
            events = [event for piece in told for event in output.push(piece)]
            if delta.finish_reason is not None:
                events += await self._end(delta.finish_reason, output, count)
            if not delta.told:
                yield events, resumption.comment(delta)

    async def _end(self, finish_reason: str, output: ResponseOutput, count: _TokenCount) -> list[dict[str, Any]]:
        """The events that end the answer, which is kept."""
        status = "incomplete" if finish_reason == "length" else "completed"
        events = list(output.finish(status))
        reasons = any(item["type"] == "reasoning" for item in output.items)
        num_prompt = len(self.prepared.request.prompt_token_ids)
        response = self._response(status, output=output.items, usage=count.usage(num_prompt, reasons=reasons))
        await self.keep(response, self.size_of(response) + num_prompt)
        return [*events, {"type": f"response.{status}", "response": response}]

    def _response(
        self,
        status: str,
        *,
        output: Sequence[Item] = (),
        usage: dict[str, Any] | None = None,
        error: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        body, params = self.body, self.prepared.request.params
        return {
            "id": self.prepared.request.request_id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "background": False,
            "error": error,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": self.model,
            "output": list(output),
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "reasoning": {"effort": None, "summary": None, **(body.reasoning or {})},
            "store": self.keeps,
            "temperature": params.temperature,
            "text": {"format": {"type": "text"}, **(body.text or {})},
            "tool_choice": "auto" if body.tool_choice is None else body.tool_choice,
            "tools": list(body.tools or ()),
            "top_logprobs": body.top_logprobs or 0,
            "top_p": params.top_p,
            "truncation": "disabled",
            "usage": usage,
        }


class _TokenCount:
    """Counts an answer's tokens; reasoning tokens end with the one that closes the reasoning."""

    def __init__(self, server: ServerContext) -> None:
        style = server.chat_parsers.reasoning
        self._close_id = None if style is None else server.tokenizer.token_id(style.close)
        self._num_tokens = self._num_cached = 0
        self._num_reasoning: int | None = None

    def add(self, token_ids: Sequence[int], num_cached: int) -> None:
        if self._num_reasoning is None and self._close_id in token_ids:
            self._num_reasoning = self._num_tokens + list(token_ids).index(self._close_id or 0) + 1
        self._num_tokens += len(token_ids)
        self._num_cached = num_cached

    def usage(self, num_prompt: int, *, reasons: bool) -> dict[str, Any]:
        """reasons: whether the answer has reasoning. If the reasoning does not end, all tokens belong to it."""
        num_reasoning = self._num_tokens if self._num_reasoning is None else self._num_reasoning
        return {
            "input_tokens": num_prompt,
            "input_tokens_details": {"cached_tokens": self._num_cached, "cache_write_tokens": 0},
            "output_tokens": self._num_tokens,
            "output_tokens_details": {"reasoning_tokens": num_reasoning if reasons else 0},
            "total_tokens": num_prompt + self._num_tokens,
        }
