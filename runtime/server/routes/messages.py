"""/v1/messages: Anthropic's API of one answer."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from llmc.runtime.outputs import TokenDelta
from llmc.runtime.server.event_stream import EventStream, named_sse, until_gone
from llmc.runtime.server.request_stream import RequestStream

from .. import answers
from ..bodies import declared_size, json_route
from ..bounds import check_bounds
from ..chat_jobs import PreparedChat, count_prompt, pieces, prepare_chat
from ..context import ServerContext
from ..errors import as_api_error
from ..json_text import json_response
from ..message_errors import error_event
from ..message_output import MessageOutput
from ..protocol.message_requests import MessagesRequest


def router(server: ServerContext) -> APIRouter:
    """The endpoints."""
    routes = APIRouter(tags=["messages"], route_class=json_route(server.lanes.bodies))

    @routes.post("/v1/messages", response_model=None)
    async def create_message(body: MessagesRequest, request: Request) -> Response:
        """One answer to a conversation, in Anthropic's shape."""
        server.check_ready()
        server.check_task("generate")
        model = server.check_model(body.model)
        body.check()
        check_bounds(server.engine, body)
        chat = await server.lanes.run(body.chat, declared_size(request))
        prepared = await prepare_chat(server, chat, request, answers.new_id("msg").replace("-", "_"), model)
        job = _Job(server, model, prepared)
        (stream,) = answers.submit(server, [prepared.request])
        if body.stream:
            return EventStream(job.told(stream), stream.close)
        message = await until_gone(request, stream.close, job.answer(stream))
        return await json_response(server.lanes, lambda: message, message["usage"]["output_tokens"])

    @routes.post("/v1/messages/count_tokens")
    async def count_tokens(body: MessagesRequest, request: Request) -> dict[str, Any]:
        """How many tokens the model sees of a conversation; nothing is generated."""
        server.check_model(body.model)
        body.check()
        check_bounds(server.engine, body)
        chat = await server.lanes.run(body.chat, declared_size(request))
        return {"input_tokens": await count_prompt(server, chat)}

    return routes


@dataclass
class _Job:
    """One HTTP request, and how its answer is sent."""

    server: ServerContext
    model: str
    prepared: PreparedChat

    async def answer(self, stream: RequestStream) -> dict[str, Any]:
        """The JSON of an answer that does not stream."""
        output = MessageOutput()
        message: dict[str, Any] = {}
        async for event in self._events(stream, output):
            if event["type"] == "message_start":
                message = event["message"]
            elif event["type"] == "message_delta":
                message = {**message, **event["delta"], "usage": event["usage"]}
        return {**message, "content": output.blocks}

    async def told(self, stream: RequestStream) -> AsyncIterator[bytes]:
        """The events of a streamed answer."""
        try:
            async for event in self._events(stream, MessageOutput()):
                yield await named_sse(self.server.lanes, event)
        except Exception as error:  # the status is sent: the client learns it from an event
            yield await named_sse(self.server.lanes, error_event(as_api_error(error)))

    async def _events(self, stream: RequestStream, output: MessageOutput) -> AsyncIterator[dict[str, Any]]:
        reader = self.prepared.make_output(0)
        yield {"type": "message_start", "message": self._message()}
        yield {"type": "ping"}
        num_output, last = 0, None
        async for delta, told in pieces(stream, reader):
            num_output += len(delta.token_ids)
            for event in (event for piece in told for event in output.push(piece)):
                yield event
            if delta.finish_reason is not None:
                last = delta
        if last is None:  # the client went away
            return
        for event in output.finish():
            yield event
        reason = _stop_reason(last, output)
        end = {"stop_reason": reason, "stop_sequence": last.stop_reason if reason == "stop_sequence" else None}
        yield {"type": "message_delta", "delta": end, "usage": self._usage(last.num_cached_tokens, num_output)}
        yield {"type": "message_stop"}

    def _message(self) -> dict[str, Any]:
        return {
            "id": self.prepared.request.request_id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": self._usage(0, 0),
        }

    def _usage(self, num_cached: int, num_output: int) -> dict[str, Any]:
        """Usage. Tokens from the prefix cache do not count as input tokens; their number is known at the end."""
        return {
            "input_tokens": len(self.prepared.request.prompt_token_ids) - num_cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": num_cached,
            "output_tokens": num_output,
        }


def _stop_reason(end: TokenDelta, output: MessageOutput) -> str:
    if end.finish_reason == "length":
        return "max_tokens" if end.finish_detail is None else "model_context_window_exceeded"
    if output.called_tools:
        return "tool_use"
    return "stop_sequence" if isinstance(end.stop_reason, str) else "end_turn"
