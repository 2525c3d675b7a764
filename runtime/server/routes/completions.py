"""/v1/completions: text that goes on from a prompt."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from llmc.runtime.gathered import Gathered
from llmc.runtime.generation import decoder
from llmc.runtime.outputs import CompletionOutput, TokenDelta, TokenLogprob
from llmc.runtime.server.event_stream import DONE, EventStream, large_sse, sse, until_gone
from llmc.runtime.server.output_format import guided_of
from llmc.runtime.server.request_stream import RequestStream, merged

from .. import answers
from ..bodies import json_route
from ..bounds import check_bounds
from ..context import ServerContext
from ..failover import Resumption, spread_seed
from ..json_text import json_response
from ..logprobs import completion_logprobs, prompt_logprobs_json
from ..prompts import checked_max_tokens, encode_prompts
from ..protocol.common import usage
from ..protocol.completions import CompletionRequest
from ..protocol.ranking import check_guide
from ..requests import EngineRequest
from ..text_offsets import TextOffsets

DEFAULT_MAX_TOKENS = 16


def router(server: ServerContext) -> APIRouter:
    """The endpoint."""
    routes = APIRouter(tags=["completions"], route_class=json_route(server.lanes.bodies))

    @routes.post("/v1/completions", response_model=None)
    async def create_completion(body: CompletionRequest, request: Request) -> Response:
        """OpenAI's legacy completions: one prompt or a batch of them."""
        server.check_ready()
        server.check_task("generate")
        model = server.check_model(body.model)
        body.check()
        check_bounds(server.engine, body)
        job = await _prepare(server, body, model, request)
        wanted = await server.hand_over.prepare(request, job.resumption.engine_requests(job.requests))
        streams = answers.submit(server, wanted, streams=bool(body.stream))
        close = lambda: answers.close_all(streams)  # noqa: E731
        if body.stream:
            return EventStream(job.events(streams), close)
        gathered = asyncio.gather(*(answers.gather(stream) for stream in streams))
        found = await until_gone(request, close, gathered)
        size = len(found) + answers.size_of(found, body.logprobs, job.prompt_alternatives)
        return await json_response(server.lanes, lambda: job.answer(found), size)

    return routes


async def _prepare(server: ServerContext, body: CompletionRequest, model: str, request: Request) -> _Job:
    special = body.add_special_tokens is not False
    ids = await encode_prompts(server, body.prompts, add_special_tokens=special, truncate=body.truncate_prompt_tokens)
    asked = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    for one in ids:
        # Defaults to as much as fits, as in vLLM; an explicit value must fit.
        if body.max_tokens is not None:
            checked_max_tokens(server, asked, len(one), "max_tokens")
    only_echo = bool(body.echo) and body.max_tokens == 0
    prompt_logprobs = body.logprobs if body.echo and body.logprobs is not None else None
    if body.prompt_logprobs is not None:
        prompt_logprobs = max(body.prompt_logprobs, prompt_logprobs or 0)
    guided = None
    if body.has_constraint:
        guided = await server.lanes.compile(lambda: guided_of(body, server.schema_defaults))
    guide = await answers.guide_maker(server, guided)
    check_guide(body, guide is not None)
    deadline_s = answers.deadline_of(server, request)
    params = body.sampling(
        server.sampling_defaults(), max_tokens=max(asked, 1), logprobs=body.logprobs, prompt_logprobs=prompt_logprobs
    )
    failover = body.llmc_failover
    answer_id = answers.new_id("cmpl") if failover is None else failover.id
    created = int(time.time()) if failover is None else failover.created
    adapter = server.adapter_id(model)
    requests = [
        EngineRequest(
            request_id=answer_id if len(ids) == 1 else f"{answer_id}-{index}",
            prompt_token_ids=tuple(one),
            params=params,
            priority=body.priority or 0,
            deadline_s=deadline_s,
            guide=guide,
            index=index,
            adapter=adapter,
        )
        for index, one in enumerate(ids)
    ]
    if body.seed is None:
        requests = [spread_seed(failover, one) for one in requests]
    resumption = Resumption(failover, body.num_outputs)
    return _Job(server, body, model, answer_id, created, requests, only_echo, resumption)


@dataclass
class _Job:
    """One HTTP request: its engine requests, and how their answers are sent."""

    server: ServerContext
    body: CompletionRequest
    model: str
    answer_id: str
    created: int
    requests: list[EngineRequest]
    only_echo: bool
    resumption: Resumption
    _known_offsets: dict[int, list[int]] = field(default_factory=dict)

    def answer(self, gathered: Sequence[Gathered]) -> dict[str, Any]:
        """The JSON of an answer that does not stream."""
        choices = []
        for index, one in enumerate(gathered):
            echo = self._prompt_text(index)
            for number, output in enumerate(one.outputs):
                token_ids, logprobs, text = output.token_ids, output.logprobs, output.text
                if self.only_echo:
                    token_ids, logprobs, text = (), (), ""
                choice = self._choice(index, number, echo + text, output)
                if (offsets := self._offsets(index)) is not None:
                    offsets.tell(text)
                    choice["logprobs"] = self._logprobs(index, one.prompt_logprobs, logprobs or (), offsets, last=True)
                if self.body.prompt_logprobs is not None:
                    choice["prompt_logprobs"] = self._prompt_logprobs(one.prompt_logprobs)
                if self.body.return_token_ids:
                    choice["prompt_token_ids"] = list(self.requests[index].prompt_token_ids)
                    choice["token_ids"] = list(token_ids)
                choices.append(choice)
        num_output = 0 if self.only_echo else sum(one.num_tokens for one in gathered)
        total = usage(self._num_prompt_tokens, num_output, sum(one.num_cached_tokens for one in gathered))
        return {**self._head(choices), "usage": total}

    async def events(self, streams: Sequence[RequestStream]) -> AsyncIterator[bytes]:
        """The events of an answer that streams."""
        resumption = self.resumption
        num_output, cached = 0 if self.only_echo else resumption.num_tokens, [0] * len(self.requests)
        told: set[tuple[int, int]] = set()
        prompts: dict[int, Sequence[TokenLogprob]] = {}
        offsets: dict[tuple[int, int], TextOffsets | None] = {}
        async for delta in merged(streams):
            index = delta.index
            key = (index, delta.output_index)
            if resumption.ended(*key):
                continue
            answers.check_end(delta)
            cached[index] = delta.num_cached_tokens
            first = key not in told
            if delta.prompt_logprobs is not None:
                prompts[index] = delta.prompt_logprobs
            if first:
                offsets[key] = self._offsets(index)
            if delta.told:
                told.add(key)
                if (known := offsets[key]) is not None:
                    known.tell(delta.text)
                    known.of(delta.token_ids)
                continue
            num_output += 0 if self.only_echo else len(delta.token_ids)
            if first:
                told.add(key)
            size = self._size(delta, prompts.get(index) if first else None)
            chunk = await self.server.lanes.run(
                partial(self._chunk, index, delta, prompts.get(index), offsets[key], first=first), size
            )
            if chunk is None:
                if comment := resumption.comment(delta):
                    yield comment
                continue
            so_far = usage(self._num_prompt_tokens, num_output, sum(cached))
            event = {**self._head([chunk]), "usage": so_far if self.body.continuous_usage else None}
            yield await large_sse(self.server.lanes, partial(dict, event), size) + resumption.comment(delta)
        if self.body.include_usage:
            yield sse({**self._head([]), "usage": usage(self._num_prompt_tokens, num_output, sum(cached))})
        yield DONE

    def _offsets(self, index: int) -> TextOffsets | None:
        """Offsets of the output's tokens, in the logprobs of a choice; None without logprobs."""
        if self.body.logprobs is None:
            return None
        request = self.requests[index]
        return TextOffsets(
            self.server.token_texts,
            decoder(self.server.engine.tokenizer, request.params),
            skips_special=request.params.skip_special_tokens,
            context=request.prompt_token_ids,
            start=len(self._prompt_text(index)),
        )

    def _prompt_offsets(self, index: int) -> list[int]:
        """Those of the prompt's tokens, which all choices repeat."""
        if index not in self._known_offsets:
            self._known_offsets[index] = self._find_prompt_offsets(index)
        return self._known_offsets[index]

    def _find_prompt_offsets(self, index: int) -> list[int]:
        request, prompt = self.requests[index], self.body.prompts[index]
        offsets = TextOffsets(
            self.server.token_texts,
            decoder(self.server.engine.tokenizer, request.params),
            skips_special=request.params.skip_special_tokens,
            given=self._prompt_text(index) if isinstance(prompt, str) else None,
        )
        offsets.tell(self._prompt_text(index))
        return offsets.of(request.prompt_token_ids, last=True)

    def _size(self, delta: TokenDelta, prompt: Sequence[TokenLogprob] | None) -> int:
        """Approximate number of values in a chunk."""
        alternatives = max(self.body.logprobs or 0, self.prompt_alternatives or 0)
        return (len(delta.logprobs or ()) + len(prompt or ())) * 3 * (1 + alternatives)

    @property
    def prompt_alternatives(self) -> int | None:
        """Alternatives beside each token of the prompt; None: no prompt logprobs."""
        return self.requests[0].params.prompt_logprobs

    def _chunk(
        self,
        index: int,
        delta: TokenDelta,
        prompt: Sequence[TokenLogprob] | None,
        offsets: TextOffsets | None,
        *,
        first: bool,
    ) -> dict[str, Any] | None:
        """A choice of a chunk; None if there is nothing to send yet."""
        echo = self._prompt_text(index) if first else ""
        text, token_ids, logprobs = delta.text, delta.token_ids, delta.logprobs
        if self.only_echo:
            text, token_ids, logprobs = "", (), ()
        tells_ids = bool(self.body.return_token_ids) and (first or token_ids)
        tells_prompt = first and self.body.prompt_logprobs is not None
        if not (echo or text or logprobs or delta.finish_reason or tells_ids or tells_prompt):
            return None
        choice = self._choice(index, delta.output_index, echo + text, delta)
        if offsets is not None:
            offsets.tell(text)
            last = delta.finish_reason is not None
            choice["logprobs"] = self._logprobs(index, prompt, logprobs or (), offsets, with_prompt=first, last=last)
        if tells_prompt:
            choice["prompt_logprobs"] = self._prompt_logprobs(prompt)
        if self.body.return_token_ids:
            choice["token_ids"] = list(token_ids)
            choice["prompt_token_ids"] = list(self.requests[index].prompt_token_ids) if first else None
        return choice

    def _choice(self, index: int, number: int, text: str, end: TokenDelta | CompletionOutput) -> dict[str, Any]:
        choice = {"index": index * self.body.num_outputs + number, "text": text, "logprobs": None}
        if self.only_echo and end.finish_reason:
            # The engine had to sample one token; it is not sent.
            return {**choice, "finish_reason": "length", "stop_reason": None}
        return {**choice, **answers.end_of(end, end.finish_reason)}

    def _logprobs(
        self,
        index: int,
        prompt: Sequence[TokenLogprob] | None,
        output: Sequence[TokenLogprob],
        offsets: TextOffsets,
        *,
        with_prompt: bool = True,
        last: bool,
    ) -> dict[str, Any]:
        before: list[TokenLogprob | int] = []
        places = offsets.of([entry.token_id for entry in output], last=last)
        if self.body.echo and with_prompt:
            before = [self.requests[index].prompt_token_ids[0], *(prompt or ())]
            places = [*self._prompt_offsets(index)[: len(before)], *places]
        return completion_logprobs(self.server.token_texts, [*before, *output], self.body.logprobs or 0, places)

    def _prompt_logprobs(self, entries: Sequence[TokenLogprob] | None) -> list[dict[str, dict[str, Any]] | None]:
        return prompt_logprobs_json(self.server.token_texts, entries or (), self.body.prompt_logprobs or 0)

    def _prompt_text(self, index: int) -> str:
        if not self.body.echo:
            return ""
        prompt = self.body.prompts[index]
        if isinstance(prompt, str) and self.body.truncate_prompt_tokens is None:
            return prompt
        skip = self.body.skip_special_tokens is not False
        return self.server.tokenizer.decode(self.requests[index].prompt_token_ids, skip_special_tokens=skip)

    def _head(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.answer_id,
            "object": "text_completion",
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }

    @property
    def _num_prompt_tokens(self) -> int:
        return sum(len(request.prompt_token_ids) for request in self.requests)
