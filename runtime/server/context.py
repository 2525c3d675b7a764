"""State that the routes share: configuration, engine, tokenizer and the server's state."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from llmc.runtime.adapters.adapters import Adapter
from llmc.runtime.guided.compiler import GuideCompiler
from llmc.runtime.guided.schema_defaults import SchemaDefaults
from llmc.runtime.server.late_warm_up import finish_behind_traffic
from llmc.runtime.text.tokenizer import Tokenizer, TokenizerError
from llmc.runtime.warm_up.warm_up import OnWarmStep, WarmPlan, WarmUp

from .async_engine import AsyncEngine
from .config import ServerConfig
from .errors import ApiError, draining
from .exchanges import note_model
from .hand_over import HandOver, hand_over_key
from .image_work import ImageWork
from .lanes import Lanes
from .refusals import TASK
from .request_memory import MemoryLimits, RequestMemory
from .requests import EngineRequest, ServerStopping
from .token_text import TokenTexts
from .tools.registry import choose_parsers

log = logging.getLogger("llmc.server")
ENDPOINTS: Mapping[str, Sequence[str]] = {
    "generate": ("/v1/chat/completions", "/v1/completions"),
    "embed": ("/v1/embeddings",),
    "rank": ("/v1/rerank", "/v1/score"),
    "classify": ("/classify",),
}
"""What serves a task."""


class ServerContext:
    """One per application; lives on its event loop."""

    def __init__(
        self,
        config: ServerConfig,
        engine: AsyncEngine,
        on_warm_step: OnWarmStep | None = None,
        warm_plan: WarmPlan | None = None,
    ) -> None:
        self.config = config
        self.engine = engine
        self.created = int(time.time())
        limits = MemoryLimits.of(config.max_queue_memory, config.request_memory, engine.free_memory())
        self.memory = RequestMemory(limits, engine.retry_after_s)
        self.warm_up = WarmUp(
            engine.engine,
            engine.graphs,
            warm_plan,
            block_size=engine.block_size,
            max_model_len=engine.limit.model_tokens,
            before=engine.engine.warm_draft if engine.engine.has_draft else None,
        )
        self.ready = False
        self.draining = False
        self.failure: str | None = None
        self.on_warm_step = on_warm_step
        self.on_started: list[Callable[[], None]] = []
        self.on_ready: list[Callable[[], None]] = []
        self.on_failure: list[Callable[[str], None]] = []
        self.on_stop: list[Callable[[], None]] = []
        """Called before the engine is released, on a thread that may wait."""
        self.chat_parsers = choose_parsers(config.tool_call_parser, config.reasoning_parser, engine.tokenizer)
        self._guide_compiler: GuideCompiler | None = None
        self.schema_defaults = SchemaDefaults(config.guided_additional_properties, config.guided_max_string)
        self.lanes = Lanes()
        self.images = ImageWork(engine.tower, config.max_queue)
        self.hand_over = HandOver(
            engine,
            self.lanes,
            config.role,
            hand_over_key(config, engine),
            config.hand_over_timeout_s,
            config.max_hand_overs,
        )
        self._warming: asyncio.Task[None] | None = None
        self._drained: asyncio.Task[int] | None = None
        engine.on_failure.append(self._fail)
        engine.on_joined.append(self.warm_up.joined)

    async def start(self) -> None:
        """Starts the engine's thread and the warm-up; `ready` is set when the hot graphs are warm."""
        await self.engine.start()
        for callback in self.on_started:
            callback()
        self._warming = asyncio.create_task(self._warm())

    def begin_drain(self) -> asyncio.Task[int]:
        """Refuses new requests; running ones get drain_timeout_s. The task returns how many were cancelled."""
        if self._drained is None:
            self.draining, self.ready = True, False
            self.warm_up.stopped = True
            self.engine.refuse_requests()
            self._drained = asyncio.create_task(self.engine.drain(self.config.drain_timeout_s))
        return self._drained

    async def stop(self) -> None:
        """Drains and releases the engine."""
        await self.begin_drain()
        if self._warming is not None:
            await self._warming
        self.hand_over.close()
        self.images.close()
        self.lanes.close()
        for callback in self.on_stop:
            await asyncio.to_thread(callback)
        await asyncio.to_thread(self.engine.close)

    @property
    def tokenizer(self) -> Tokenizer:
        """Raises TokenizerError when the artifact has none."""
        if self.engine.tokenizer is None:
            raise TokenizerError(f"{self.engine.path} has no tokenizer.json: give prompts as token ids")
        return self.engine.tokenizer

    @functools.cached_property
    def token_texts(self) -> TokenTexts:
        """The bytes of single tokens."""
        return TokenTexts(self.engine.path)

    @functools.cached_property
    def artifact_id(self) -> str:
        """Identifies what is served; replicas of one artifact share it."""
        return hashlib.sha256((self.engine.path / "manifest.json").read_bytes()).hexdigest()[:16]

    async def guide_compiler(self) -> GuideCompiler:
        """Compiles constraints; made at first use. Raises RequestError when the model cannot be guided."""
        if self._guide_compiler is None:
            engine = self.engine
            made = await self.lanes.compile(lambda: GuideCompiler.of_artifact(engine.path, engine.vocab_size))
            self._guide_compiler = self._guide_compiler or made
        return self._guide_compiler

    @property
    def model_name(self) -> str:
        """Model name in answers to requests that name none."""
        return self.config.served_model_names[0]

    def check_ready(self) -> None:
        """Raises ApiError 503 while the server starts, drains or has failed."""
        if self.failure is not None:
            raise ApiError(self.failure, status=503, code="engine_failed")
        if self.draining:
            raise draining("the server is shutting down: try another one")
        if not self.ready:
            done, total = self.warm_up.num_warm, self.warm_up.plan.num_hot
            message = f"the server is warming up, {done} of {total} graphs so far: wait for GET /ready to answer 200"
            headers = {"Retry-After": str(self.warm_up.seconds_left())}
            raise ApiError(message, status=503, code="starting", headers=headers)

    def check_task(self, *names: str) -> None:
        """Raises ApiError unless the model serves one of these tasks, as named by `llmc compile --task`."""
        task = self.engine.vector_task
        found = "generate" if task is None else task.name
        if found not in names:
            served = ", ".join(ENDPOINTS[found])
            message = f"this model was compiled for the task {found}, which {served} serves: ask that, or another model"
            raise ApiError(message, code=TASK)

    def check_model(self, name: str | None) -> str:
        """The served name, or adapter name, that a request asks for. Raises ApiError 404 for any other name."""
        if name is None or name == "":
            name = self.model_name
        if name not in self.config.served_model_names and self.engine.adapters.find(name) is None:
            adapters = (adapter.name for adapter in self.engine.adapters.all())
            known = ", ".join((*self.config.served_model_names, *adapters))
            message = f"the model {name!r} does not exist: this server has {known}"
            raise ApiError(message, status=404, param="model", code="model_not_found")
        note_model(name)
        return name

    def adapter(self, name: str) -> Adapter | None:
        """The adapter behind a name from `check_model`; None for the model itself."""
        return None if name in self.config.served_model_names else self.engine.adapters.find(name)

    def adapter_id(self, name: str) -> int:
        """The engine's number of that adapter, 0 for the model itself. Raises ApiError 404 if it was unloaded in the
        meantime."""
        self.check_model(name)
        adapter = self.adapter(name)
        return 0 if adapter is None else adapter.id

    def reserve_memory(self, requests: Sequence[EngineRequest], *, streams: bool) -> None:
        """Reserves the most memory that the current task's HTTP request may hold. Raises MemoryRefused."""
        engine = self.engine
        self.memory.reserve(requests, engine.max_model_len, engine.vocab_size, streams=streams)

    def sampling_defaults(self) -> dict[str, Any]:
        """Defaults of sampling parameters that a request leaves out."""
        if self.config.generation_config == "none":
            return {}
        given = self.engine.generation_config
        keys = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
        defaults = {key: given[key] for key in keys if given.get(key) is not None}
        if given.get("do_sample") is False:
            defaults["temperature"] = 0.0
        return defaults

    async def _warm(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            await loop.run_in_executor(None, self._warm_hot)
            if self.engine.tokenizer is not None:
                # Reading a large vocabulary takes long; no request should wait for it.
                await loop.run_in_executor(None, lambda: self.token_texts)
            self.ready = not self.draining
            if self.ready:
                for callback in self.on_ready:
                    callback()
                await finish_behind_traffic(self.warm_up, self.engine, self.on_warm_step)
        except ServerStopping:
            return
        except Exception as error:  # a thread's error must reach /ready and the log
            log.exception("the warm-up failed")
            self._fail(f"the warm-up failed: {error}")

    def _warm_hot(self) -> None:
        self.warm_up.restrict()
        self.warm_up.run(self.on_warm_step, hot_only=True)

    def _fail(self, why: str) -> None:
        self.failure, self.ready = why, False
        for callback in self.on_failure:
            with contextlib.suppress(Exception):
                callback(why)
