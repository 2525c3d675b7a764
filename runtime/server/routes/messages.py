"""/v1/messages: Anthropic's API of one answer."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from functools import partial
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
from ..failover import Resumption
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
        failover = body.llmc_failover
        message_id = answers.new_id("msg", "_") if failover is None else failover.id
        prepared = await prepare_chat(server, chat, request, message_id, model)
        resumption = Resumption(failover, body.num_outputs)
        wanted = await server.hand_over.prepare(request, resumption.engine_requests([prepared.request]))
        streams = answers.submit(server, wanted)
        job = _Job(server, model, prepared, resumption, streams)
        close = partial(answers.close_all, streams)
        if body.stream:
            return EventStream(job.told(), close)
        message = await until_gone(request, close, job.answer())
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
    """One HTTP request, and how its answer is sent. streams: of the engine; one, or none if the client has all."""

    server: ServerContext
    model: str
    prepared: PreparedChat
    resumption: Resumption
    streams: Sequence[RequestStream]

    async def answer(self) -> dict[str, Any]:
        """The JSON of an answer that does not stream."""
        output = MessageOutput()
        message: dict[str, Any] = {}
        async for events, _ in self._events(output):
            for event in events:
                if event["type"] == "message_start":
                    message = event["message"]
                elif event["type"] == "message_delta":
                    message = {**message, **event["delta"], "usage": event["usage"]}
        return {**message, "content": output.blocks}

    async def told(self) -> AsyncIterator[bytes]:
        """The events of a streamed answer."""
        try:
            async for events, comment in self._events(MessageOutput()):
                told = [await named_sse(self.server.lanes, event) for event in events]
                if told or comment:
                    yield b"".join(told) + comment
        except Exception as error:  # the status is sent: the client learns it from an event
            yield await named_sse(self.server.lanes, error_event(as_api_error(error)))

    async def _events(self, output: MessageOutput) -> AsyncIterator[tuple[list[dict[str, Any]], bytes]]:
        """Events that belong together, and the comment behind them."""
        reader, resumption = self.prepared.make_output(0), self.resumption
        if not resumption.begun:
            yield [{"type": "message_start", "message": self._message()}, {"type": "ping"}], resumption.head
        num_output = 0
        async for delta, told in pieces(self.streams, reader):
            num_output += len(delta.token_ids)
            events = [event for piece in told for event in output.push(piece)]
            if delta.finish_reason is not None:
                events += self._end(delta, output, num_output)
            if not delta.told:
                yield events, resumption.comment(delta)

    def _end(self, last: TokenDelta, output: MessageOutput, num_output: int) -> list[dict[str, Any]]:
        """The events that end the answer."""
        reason = _stop_reason(last, output)
        end = {"stop_reason": reason, "stop_sequence": last.stop_reason if reason == "stop_sequence" else None}
        usage = self._usage(last.num_cached_tokens, num_output)
        return [
            *output.finish(),
            {"type": "message_delta", "delta": end, "usage": usage},
            {"type": "message_stop"},
        ]

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
