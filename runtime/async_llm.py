"""The Python API for an event loop: many tasks share one engine, which runs in its own thread."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from llmc.runtime.binding.handle import LlmcError
from llmc.runtime.images.tower import TowerClosed
from llmc.runtime.server.request_stream import RequestStream, merged

from .async_vector_calls import AsyncVectorCalls
from .beams import BeamSearchParams
from .engine_loop import REFUSALS
from .frontend import Frontend, Lora, PreparedRequest
from .gathered import Gathered
from .opened import Opened, OpenedEngine, Opening
from .outputs import RequestFailure, RequestOutput, TokenDelta
from .params import SamplingParams
from .prompts import Prompts
from .request_error import RequestError
from .server.async_engine import AsyncEngine
from .server.requests import EngineRequest, ServerStopping

_CLOSED = "this AsyncLLM is closed and takes no more requests: open another one"


class AsyncLLM(Opened, AsyncVectorCalls):
    """An opened artifact for the tasks of one event loop; use it as an async context manager, or `close` it.

    Options and errors are those of `LLM`. Requests of all tasks share the engine's steps; each gets the bits that it
    would get alone. The loop is that of the first call; calls in another one raise RequestError. The warm-up runs
    before the constructor returns. Background compilation of misses starts with the first request.
    """

    engine: AsyncEngine
    _started: asyncio.Task[None] | None = None
    _event_loop: asyncio.AbstractEventLoop | None = None
    _closed = False

    def _open_engine(self, path: Path, opening: Opening) -> OpenedEngine:
        self.engine = engine = AsyncEngine(
            path,
            chat_template=opening.chat_template,
            misses=opening.misses,
            speculation=opening.speculation,
            open_tower=opening.tower,
            **opening.engine_options,
        )
        Frontend.__init__(self, engine.path, engine.vocab_size, engine.limit, vector_task=engine.vector_task)
        self._tokenizer = engine.tokenizer
        self.adapters, self.tower = engine.adapters, engine.tower
        return OpenedEngine(engine.engine, engine.graphs, engine.artifact.info)

    def _begin(self, opening: Opening) -> None:
        self.engine.on_joined.append(self.warm_up.joined)

    def _abandon(self) -> None:
        self.engine.close()

    async def stream(
        self,
        prompts: Prompts,
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_variables: Mapping[str, Any] | None = None,
        lora: Lora = None,
    ) -> AsyncGenerator[TokenDelta, None]:
        """Streams the output of one or several prompts or conversations; each delta names its prompt and output.

        Arguments are those of `LLM.stream`. A request that the engine fails ends with a delta that has an `error`.
        Closing the iterator (aclose), or cancelling the task that reads it, cancels running requests. Raises
        RequestError or ChatTemplateError at the first step, QueueFull if max_waiting requests already wait.
        """
        requests = await self._prepared(prompts, params, tools, template_variables, lora)
        async with self._open(requests) as streams, contextlib.aclosing(merged(streams)) as deltas:
            async for delta in deltas:
                yield delta

    async def generate(
        self,
        prompts: Prompts,
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_variables: Mapping[str, Any] | None = None,
        lora: Lora = None,
    ) -> list[RequestOutput]:
        """The outputs of one or several prompts, in input order; arguments and errors as for `stream`.

        Cancelling the task cancels the requests.
        """
        requests = await self._prepared(prompts, params, tools, template_variables, lora)
        gathered = [Gathered(request.params) for request in requests]
        async with self._open(requests) as streams, contextlib.aclosing(merged(streams)) as deltas:
            async for delta in deltas:
                gathered[delta.index].add(delta)
            return [
                request.output(one, stream.generation.timings(stream.started_ns))
                for request, one, stream in zip(requests, gathered, streams, strict=True)
            ]

    async def beam_search(
        self, prompts: Prompts, params: BeamSearchParams, *, lora: Lora = None
    ) -> list[RequestOutput]:
        """As LLM.beam_search."""
        return await self.generate(prompts, params.sampling(), lora=lora)

    async def load_adapter(self, name: str, path: str | Path) -> None:
        """As LLM.load_adapter; requests of other tasks go on meanwhile."""
        self._check_open()
        await asyncio.to_thread(self.adapters.load, name, Path(path))

    async def unload_adapter(self, name: str) -> None:
        """As LLM.unload_adapter."""
        self._check_open()
        self.adapters.unload(name)

    def stats(self) -> Any:
        """Counters of the engine since it was opened (binding.EngineStats)."""
        self._check_open()
        return self.engine.stats()

    async def close(self) -> None:
        """Cancels running requests and compilations, and releases the engine; idempotent. Later calls raise
        RequestError."""
        self._closed = True
        if self.tower is not None:
            # Now: the threads that encode may be all that `to_thread` has.
            self.tower.stop()
        if self._started is not None and self._event_loop is asyncio.get_running_loop():
            await self.engine.drain(0)
        await asyncio.to_thread(self.engine.close)

    async def __aenter__(self) -> AsyncLLM:
        await self._start()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    async def _start(self) -> None:
        self._check_open()
        loop = asyncio.get_running_loop()
        if self._started is None:
            self._event_loop = loop
            self._started = asyncio.create_task(self.engine.start())
        if self._event_loop is not loop:
            raise RequestError("this AsyncLLM is of another event loop: make one in each loop, or keep to one")
        # Shielded: cancelling a task here must not cancel the engine.
        await asyncio.shield(self._started)

    def _check_open(self) -> None:
        if self._closed:
            raise RequestError(_CLOSED)

    def _stream_of(self, request: EngineRequest) -> RequestStream:
        try:
            return self.engine.stream(request)
        except ServerStopping as error:
            if not self._closed:  # its engine has failed
                raise
            raise RequestError(_CLOSED) from error

    async def _prepared(self, *arguments: Any) -> list[PreparedRequest]:
        await self._start()

        def work() -> list[PreparedRequest]:
            requests = self.prepare(*arguments)
            return [request if request.images is None else request.encoded() for request in requests]

        # In a thread: tokenizing a long prompt, compiling a grammar or encoding an image would block all other tasks.
        try:
            return await asyncio.to_thread(work)
        except TowerClosed as error:
            raise RequestError(_CLOSED) from error

    @contextlib.asynccontextmanager
    async def _open(self, requests: Sequence[PreparedRequest]) -> AsyncIterator[list[RequestStream]]:
        """Submits all requests; cancels those still running on exit."""
        streams: list[RequestStream] = []
        try:
            for request in requests:
                streams.append(self._submit(request))
            yield streams
        finally:
            for stream in streams:
                stream.close()

    def _submit(self, request: PreparedRequest) -> RequestStream:
        engine_request = EngineRequest(
            request_id=uuid.uuid4().hex,
            prompt_token_ids=tuple(request.token_ids),
            params=request.params,
            guide=request.make_guide,
            index=request.index,
            adapter=request.adapter,
            placed=request.placed(),
        )
        try:
            return self._stream_of(engine_request)
        except LlmcError as error:
            if error.name not in REFUSALS:
                raise
            refused = RequestStream(engine_request, self._tokenizer, self.limit)
            refused.fail(RequestFailure(error.name, str(error)))
            return refused
