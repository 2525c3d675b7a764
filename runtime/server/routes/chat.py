"""/v1/chat/completions: the assistant's next message."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from llmc.runtime.gathered import Gathered
from llmc.runtime.outputs import TokenLogprob
from llmc.runtime.server.event_stream import DONE, EventStream, large_sse, sse, until_gone
from llmc.runtime.server.request_stream import RequestStream, merged

from .. import answers
from ..bodies import json_route
from ..bounds import check_bounds
from ..chat_jobs import prepare_chat
from ..chat_output import ChatDelta, ChatOutput
from ..context import ServerContext
from ..failover import Resumption
from ..json_text import json_response
from ..logprobs import chat_logprobs, prompt_logprobs_json
from ..protocol.chat import ChatRequest
from ..protocol.common import usage
from ..requests import EngineRequest


def router(server: ServerContext) -> APIRouter:
    """The endpoint."""
    routes = APIRouter(tags=["chat"], route_class=json_route(server.lanes.bodies))

    @routes.post("/v1/chat/completions", response_model=None)
    async def create_chat_completion(body: ChatRequest, request: Request) -> Response:
        """One conversation, `n` answers to it."""
        server.check_ready()
        server.check_task("generate")
        model = server.check_model(body.model)
        body.check()
        check_bounds(server.engine, body)
        job = await _prepare(server, body, model, request)
        wanted = await server.hand_over.prepare(request, job.resumption.engine_requests([job.request]))
        streams = answers.submit(server, wanted, streams=bool(body.stream))
        if body.stream:
            return EventStream(job.events(streams), partial(answers.close_all, streams))
        (stream,) = streams
        found = await until_gone(request, stream.close, answers.gather(stream))
        size = answers.size_of([found], body.num_logprobs, body.prompt_logprobs)
        return await json_response(server.lanes, lambda: job.answer(found), size)

    return routes


async def _prepare(server: ServerContext, body: ChatRequest, model: str, request: Request) -> _Job:
    failover = body.llmc_failover
    answer_id = answers.new_id("chatcmpl") if failover is None else failover.id
    created = int(time.time()) if failover is None else failover.created
    prepared = await prepare_chat(server, body, request, answer_id, model)
    resumption = Resumption(failover, body.num_outputs)
    return _Job(server, body, model, created, prepared.request, prepared.make_output, resumption)


@dataclass
class _Job:
    """One HTTP request: its engine request, and how its answer is sent. make_output: see PreparedChat."""

    server: ServerContext
    body: ChatRequest
    model: str
    created: int
    request: EngineRequest
    make_output: Callable[[int], ChatOutput]
    resumption: Resumption

    def answer(self, gathered: Gathered) -> dict[str, Any]:
        """The JSON of an answer that does not stream."""
        choices = []
        for index, output in enumerate(gathered.outputs):
            reader = self.make_output(index)
            deltas = [*reader.push(output.text, output.token_ids), *reader.finish()]
            choice: dict[str, Any] = {
                "index": index,
                "message": _message(deltas),
                "logprobs": None,
                **answers.end_of(output, _finish_reason(reader, output.finish_reason)),
            }
            if self.body.logprobs:
                choice["logprobs"] = chat_logprobs(self.server.token_texts, output.logprobs or ())
            if self.body.return_token_ids:
                choice["token_ids"] = list(output.token_ids)
            choices.append(choice)
        body = self._head("chat.completion", choices)
        if self.body.prompt_logprobs is not None:
            body["prompt_logprobs"] = self._prompt_logprobs(gathered.prompt_logprobs or ())
        if self.body.return_token_ids:
            body["prompt_token_ids"] = list(self.request.prompt_token_ids)
        body["usage"] = usage(self._num_prompt_tokens, gathered.num_tokens, gathered.num_cached_tokens)
        return body

    async def events(self, streams: Sequence[RequestStream]) -> AsyncIterator[bytes]:
        """Events of a streamed answer: roles first, then pieces; the last piece of a choice carries its finish
        reason."""
        readers = [self.make_output(index) for index in range(self.body.num_outputs)]
        resumption = self.resumption
        num_output, num_cached = resumption.num_tokens, 0
        if not resumption.begun:
            for event in self._begin():
                yield event
        async for delta in merged(streams):
            if resumption.ended(0, delta.output_index):
                continue
            if (
                delta.prompt_logprobs is not None
                and self.body.prompt_logprobs is not None
                and not resumption.num_tokens
            ):
                yield await large_sse(
                    self.server.lanes,
                    lambda entries=delta.prompt_logprobs: {  # type: ignore[misc]
                        **self._head("chat.completion.chunk", []),
                        "prompt_logprobs": self._prompt_logprobs(entries),
                    },
                    len(delta.prompt_logprobs) * 3 * (1 + self.body.prompt_logprobs),
                )
            num_cached = delta.num_cached_tokens
            answers.check_end(delta)
            index, reader = delta.output_index, readers[delta.output_index]
            pieces = list(reader.push(delta.text, delta.token_ids)) if delta.text or delta.token_ids else []
            if delta.told:
                continue
            num_output += len(delta.token_ids)
            more: dict[str, Any] = {}
            if self.body.logprobs and delta.logprobs:
                more["logprobs"] = chat_logprobs(self.server.token_texts, delta.logprobs)
            if self.body.return_token_ids:
                more["token_ids"] = list(delta.token_ids)
            if delta.finish_reason is not None:
                pieces += reader.finish()
                more |= answers.end_of(delta, _finish_reason(reader, delta.finish_reason))
            told = [_delta(piece) for piece in pieces] or ([{}] if more else [])
            for position, piece in enumerate(told):
                last = position == len(told) - 1
                event = self._event(index, piece, num_output, num_cached, more if last else {})
                yield event + resumption.comment(delta) if last else event
            if not told and (comment := resumption.comment(delta)):
                yield comment
        if self.body.include_usage:
            total = usage(self._num_prompt_tokens, num_output, num_cached)
            yield sse({**self._head("chat.completion.chunk", []), "usage": total})
        yield DONE

    def _begin(self) -> list[bytes]:
        """Events before the first token."""
        role = {"role": "assistant", "content": ""}
        events = [self._event(index, role, 0, 0) for index in range(self.body.num_outputs)]
        if self.body.return_token_ids:
            prompt_ids = list(self.request.prompt_token_ids)
            events.append(sse({**self._head("chat.completion.chunk", []), "prompt_token_ids": prompt_ids}))
        events[-1] += self.resumption.head
        return events

    def _event(
        self,
        index: int,
        delta: dict[str, Any],
        num_output: int,
        num_cached: int,
        more: dict[str, Any] | None = None,
    ) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None, **(more or {})}
        chunk = self._head("chat.completion.chunk", [choice])
        if self.body.continuous_usage:
            chunk["usage"] = usage(self._num_prompt_tokens, num_output, num_cached)
        elif self.body.include_usage:
            chunk["usage"] = None
        return sse(chunk)

    def _prompt_logprobs(self, entries: Sequence[TokenLogprob]) -> list[dict[str, dict[str, Any]] | None]:
        return prompt_logprobs_json(self.server.token_texts, entries, self.body.prompt_logprobs or 0)

    def _head(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.request.request_id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }

    @property
    def _num_prompt_tokens(self) -> int:
        return len(self.request.prompt_token_ids)


def _finish_reason(reader: ChatOutput, reason: str) -> str:
    return "tool_calls" if reason == "stop" and reader.called_tools else reason


def _delta(piece: ChatDelta) -> dict[str, Any]:
    told: dict[str, Any] = {}
    if piece.reasoning_content:
        told["reasoning_content"] = piece.reasoning_content
    if piece.content:
        told["content"] = piece.content
    if piece.tool_calls:
        told["tool_calls"] = list(piece.tool_calls)
    return told


def _message(deltas: Sequence[ChatDelta]) -> dict[str, Any]:
    """The deltas of one continuation as the message they add up to."""
    content = "".join(delta.content for delta in deltas)
    reasoning = "".join(delta.reasoning_content for delta in deltas)
    calls: dict[int, dict[str, Any]] = {}
    for part in (part for delta in deltas for part in delta.tool_calls):
        call = calls.setdefault(part["index"], {"id": None, "type": "function", "function": {}})
        call["id"] = call["id"] or part.get("id")
        for name, text in part.get("function", {}).items():
            call["function"][name] = call["function"].get(name, "") + text
    message: dict[str, Any] = {"role": "assistant", "content": content if content or not calls else None}
    message["refusal"] = None
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = [calls[index] for index in sorted(calls)]
    return message
