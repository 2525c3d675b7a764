"""The engine behind an event loop: one thread steps it; the loop submits, cancels and takes events.

The loop polls events when the engine's thread notifies it, so that no text or JSON work delays a step. Notifications
coalesce: a busy loop does not slow the engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from llmc.machine import available_memory
from llmc.runtime.adapters.adapters import Adapters
from llmc.runtime.binding import Artifact, ArtifactInfo, Engine, EngineStats, GraphInfo, LlmcError
from llmc.runtime.binding.events import Event
from llmc.runtime.binding.statistics import BucketMiss, GraphStats
from llmc.runtime.context_limit import ContextLimit
from llmc.runtime.drafts import opened_draft
from llmc.runtime.engine_steps import cancel
from llmc.runtime.images.tower import Tower
from llmc.runtime.joining import join_graphs, take_graphs
from llmc.runtime.misses.handling import MissHandling
from llmc.runtime.misses.options import MissOptions
from llmc.runtime.outputs import RequestFailure
from llmc.runtime.server.mask_workers import GuideWorkers
from llmc.runtime.server.request_stream import RequestStream
from llmc.runtime.speculation import Speculation
from llmc.runtime.text.tokenizer import artifact_tokenizer, read_generation_config
from llmc.runtime.vector_task import VectorTask

from .backlog import Backlog
from .engine_thread import EngineThread
from .lanes import NICE
from .niceness import give_way
from .pace import Pace
from .requests import EngineRequest, QueueFull, RequestRecord, ServerStopping

log = logging.getLogger("llmc.server")
_Value = TypeVar("_Value")
_MAX_QUEUE = 65536
# The engine holds a batch's running sequences, and as many waiting ones.
_WINDOW_STEPS = 2
_EVENTS_AT_ONCE, _TAKING_S, _EVENTS_AHEAD = 128, 0.005, 256
_DRAINED = RequestFailure("draining", "the server shut down before the answer was complete")


class AsyncEngine:
    """An opened artifact and its engine. chat_template: replaces the model's. guided_threads: number that compute
    masks; 0 for automatic. misses: policy and handling, active from `start`. open_tower: opens what sees images for the
    artifact, if it is to see any. Other options are those of `Engine`.
    max_model_len: most tokens of a request, prompt plus output: the artifact's, or less if the KV pool is smaller.

    All methods but `close` belong to the event loop that called `start`. Raises the binding's errors when the artifact
    cannot be opened or does not run here.
    """

    def __init__(
        self,
        path: Path,
        *,
        chat_template: str | None = None,
        guided_threads: int = 0,
        misses: MissOptions | None = None,
        speculation: Speculation | None = None,
        open_tower: Callable[[Path, ArtifactInfo], Tower | None] = lambda path, info: None,
        **options: Any,
    ) -> None:
        self._miss_options = misses or MissOptions()
        self.path = path
        # First: a model cannot be served without its tokenizer.
        self.tokenizer = artifact_tokenizer(path, chat_template)
        self.artifact = Artifact(path)
        try:
            guesses = speculation or Speculation()
            with opened_draft(guesses.draft, path) as draft:
                wants = {"miss_policy": self._miss_options.of_engine, **guesses.engine_options(), **options}
                self.engine = Engine(self.artifact, draft=draft, **wants)
        except BaseException:
            self.artifact.close()
            raise
        info = self.artifact.info
        self.limit = ContextLimit.of_engine(self.engine, info, options)
        self.max_model_len, self.block_size = self.limit.tokens, info.block_size
        self.vocab_size = info.vocab_size
        self.vector_task = VectorTask.of_artifact(path, info.vector_width)
        self.max_num_seqs = min(info.max_num_seqs, int(options.get("max_num_seqs") or info.max_num_seqs))
        self.adapters = Adapters(path, self.artifact, self.engine)
        try:
            self.tower = open_tower(path, info)
        except BaseException:
            self.engine.close()
            self.artifact.close()
            raise
        self.graphs: list[GraphInfo] = self.artifact.graphs()
        self.generation_config = read_generation_config(path)
        self.on_submit: list[Callable[[EngineRequest], None]] = []
        self.on_record: list[Callable[[RequestRecord], None]] = []
        self.on_failure: list[Callable[[str], None]] = []
        self.on_joined: list[Callable[[Sequence[GraphInfo], bool], None]] = []
        self._streams: dict[int, RequestStream] = {}
        self._backlog = Backlog(_WINDOW_STEPS * self.max_num_seqs, self._submit)
        self._max_queue = int(options.get("max_waiting") or _MAX_QUEUE)
        self._guides = GuideWorkers(
            self.engine,
            lambda engine_id, output, mask: self.thread.call(lambda: self._finish_output(engine_id, output, mask)),
            lambda engine_id, error: self.thread.call(lambda: self._fail_request(engine_id, error)),
            guided_threads,
        )
        self.thread = EngineThread(
            self.engine, max(2, _EVENTS_AHEAD // self.max_num_seqs), self._take_events, self._fail_all
        )
        self._misses: MissHandling | None = None
        # Calls of the engine off its thread; `close` waits for them.
        self._aside = ThreadPoolExecutor(2, thread_name_prefix="llmc-aside", initializer=lambda: give_way(NICE))
        self._stepped: asyncio.Future[None] | None = None
        self._draining = False
        self._emptied: asyncio.Event = asyncio.Event()
        self._pace = Pace()

    async def start(self) -> None:
        """Starts the engine's thread, and the handling of misses."""
        self.thread.start()
        self._misses = MissHandling(self, self._miss_options)

    def stream(self, request: EngineRequest) -> RequestStream:
        """Submits a request immediately, and returns an iterator of its deltas; closing it cancels the request.

        Raises QueueFull, ServerStopping, or LlmcError if the engine refuses it.
        """
        return self.batch([request])[0]

    def batch(self, requests: Sequence[EngineRequest]) -> list[RequestStream]:
        """Submits a client's batch: a window of it now, the rest as these finish.

        Raises as `stream` does, and then runs nothing. A later refusal by the engine is a delta with an error.
        """
        if not self.thread.started or self._draining or self.failure is not None:
            raise ServerStopping(self.failure or "the server is shutting down and takes no more requests")
        if len(requests) > 1 and self.num_waiting + len(requests) > self._max_queue:
            raise self._queue_full()
        streams = [RequestStream(request, self.tokenizer, self.limit) for request in requests]
        try:
            self._backlog.open(streams)
        except BaseException:
            for stream in streams:
                stream.close()
            raise
        for stream in streams:
            stream.cancel = stream.cancel or partial(self._cancel_unsubmitted, stream)
            for callback in self.on_submit:
                callback(stream.request)
        return streams

    @property
    def failure(self) -> str | None:
        """One sentence on why the engine's thread has ended; None while it runs."""
        return self.thread.failure

    def retry_after_s(self) -> int:
        """Estimated seconds until half of the waiting requests have finished."""
        return self._pace.seconds_to_halve(self.num_waiting, time.monotonic())

    def free_memory(self) -> int:
        """Bytes of the machine's memory left once the pools of KV blocks and states, which fill gradually, are full."""
        stats, info = self.engine.stats, self.artifact.info
        pools = stats.num_blocks * info.kv_block_bytes + stats.num_states * info.state_bytes
        return max(0, available_memory() - pools)

    @property
    def num_active(self) -> int:
        """Running and waiting requests."""
        return len(self._streams) + self._backlog.num_waiting

    @property
    def num_waiting(self) -> int:
        """Waiting requests, in the engine or behind others of their batch."""
        return self.engine.stats.num_waiting + self._backlog.num_waiting

    def live_streams(self) -> list[RequestStream]:
        """Running and waiting requests: the engine's, oldest first, then the rest, oldest first."""
        return [*self._streams.values(), *self._backlog.waiting()]

    def stats(self) -> EngineStats:
        """Counters of the engine since it was opened; requests behind others of their batch count as waiting."""
        stats = self.engine.stats
        return dataclasses.replace(stats, num_waiting=stats.num_waiting + self._backlog.num_waiting)

    def graph_stats(self) -> list[GraphStats]:
        """Replays of each graph, by index of `graphs`."""
        return self.engine.graph_stats()

    def add_graphs(self, path: Path) -> int:
        """Takes over the new graphs of `path`, the artifact with buckets added, for use by requests; returns their
        number.

        Thread-safe. Raises LlmcError; the engine then continues with its present graphs.
        """
        num_new = join_graphs(self.engine, self.graphs, path)
        for callback in self.on_joined:
            callback(self.graphs[len(self.graphs) - num_new :], True)
        return num_new

    def take_graphs(self, path: Path) -> range:
        """As `add_graphs`, but no request uses them yet; returns their indices. From any thread but the event
        loop's."""
        new = take_graphs(self.engine, self.graphs, path)
        for index in new:
            # Only fetches code and commands; a replay would delay a step by a whole step.
            self.call_between_steps(partial(self.engine.walk_graph, index))
        for callback in self.on_joined:
            callback(self.graphs[new.start : new.stop], False)
        return new

    def bucket_misses(self) -> list[BucketMiss]:
        """The shapes that missed."""
        return self.engine.bucket_misses()

    def evictions(self) -> dict[int, int]:
        """Preempted sequences by their own priority, evicted for higher priorities."""
        return self.engine.evictions()

    async def check_integrity(self) -> str | None:
        """Lets the engine's thread check its blocks between two steps; the error, or None."""
        if self.failure is not None:
            return self.failure
        try:
            await self.between_steps(self.engine.check_integrity)
        except LlmcError as error:
            return str(error)
        return None

    async def between_steps(self, work: Callable[[], _Value]) -> _Value:
        """As in EngineThread."""
        return await self.thread.between_steps(work)

    def call_between_steps(self, work: Callable[[], _Value]) -> _Value:
        """As in EngineThread."""
        return self.thread.call_between_steps(work)

    async def beside_steps(self, work: Callable[[], _Value]) -> _Value:
        """Runs a call of the engine that is safe beside steps: between two of them, or at once while there are none.
        Raises what it raises, and ServerStopping."""
        queued = self.thread.unless_asleep(work)
        return await (self.aside(work) if queued is None else queued)

    async def aside(self, work: Callable[[], _Value]) -> _Value:
        """Runs a call of the engine for which no step has to wait. Raises what it raises, and ServerStopping."""
        try:
            running = asyncio.get_running_loop().run_in_executor(self._aside, work)
        except RuntimeError as error:  # the threads have ended
            raise ServerStopping("the engine has ended") from error
        return await running

    def next_step(self) -> asyncio.Future[None]:
        """Done when the next step has ended. It may never be, where no request runs."""
        if self._stepped is None or self._stepped.done():
            self._stepped = asyncio.get_running_loop().create_future()
        return self._stepped

    def refuse_requests(self) -> None:
        """Makes `stream` raise ServerStopping from now on."""
        self._draining = True

    async def drain(self, timeout_s: float | None) -> int:
        """Refuses new requests, lets running ones finish within timeout_s, cancels the rest; returns the number
        cancelled."""
        self.refuse_requests()
        cancelled = 0
        if self.num_active:
            try:
                await asyncio.wait_for(self._emptied.wait(), timeout_s)
            except TimeoutError:
                cancelled = self.num_active
                self._fail_unsubmitted(_DRAINED)
                self._tell_if_empty()
                for engine_id in list(self._streams):
                    cancel(self.engine, engine_id)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._emptied.wait(), 10.0)
        return cancelled

    def abandon(self) -> int:
        """Ends all requests immediately, without involving the engine; returns their number."""
        self.refuse_requests()
        engine_ids, num_active = list(self._streams), self.num_active
        self._fail_streams(_DRAINED)
        for engine_id in engine_ids:
            cancel(self.engine, engine_id)
        return num_active

    def close(self) -> None:
        """Stops the thread after the current step and images after the current tile, stops compilation, and releases
        the engine; idempotent."""
        self._draining = True
        if self.tower is not None:
            self.tower.stop()
        self.thread.stop()
        if self._misses is not None:
            self._misses.close()
        self._guides.close()
        self._aside.shutdown()
        if self.tower is not None:
            self.tower.close()
        self.engine.close()
        self.artifact.close()

    def _take_events(self) -> None:
        """Takes events for a few milliseconds; the rest waits until other tasks had the loop."""
        self.thread.begin_taking()
        self._tell_stepped()
        end = time.monotonic() + _TAKING_S
        while not self.thread.stopping.is_set():
            events = self.engine.poll(_EVENTS_AT_ONCE)
            # First masks are asked for: the engine waits a moment for them, not for texts.
            for event in events:
                stream = self._streams.get(event.request_id)
                if stream is not None and stream.request.guide is not None:
                    self._guides.take(event)
            for event in events:
                self._take(event)
            if len(events) < _EVENTS_AT_ONCE:
                self.thread.caught_up()
                return
            if time.monotonic() > end:
                self.thread.notify()
                return

    def _tell_stepped(self) -> None:
        if self._stepped is not None and not self._stepped.done():
            self._stepped.set_result(None)

    def _take(self, event: Event) -> None:
        stream = self._streams.get(event.request_id)
        if stream is None:
            return
        was_done = stream.done
        stream.take(event)
        if stream.engine_done:
            self._end(event.request_id, stream)
        elif stream.done and not was_done:
            cancel(self.engine, event.request_id)
        if event.kind in ("finished", "failed"):
            self._backlog.sequence_ended(event.request_id, last=stream.engine_done)
            self._tell_if_empty()

    def _end(self, engine_id: int, stream: RequestStream) -> None:
        del self._streams[engine_id]
        self._pace.note(time.monotonic())
        if stream.request.guide is not None:
            self._guides.forget(engine_id)
        self._tell_record(stream)

    def _tell_record(self, stream: RequestStream) -> None:
        if stream.record is None:
            return
        for callback in self.on_record:
            try:
                callback(stream.record)
            except Exception:  # an observer's failure must not leave requests waiting
                log.exception("an observer of finished requests failed")

    def _tell_if_empty(self) -> None:
        if not self.num_active:
            self._emptied.set()

    def _submit(self, stream: RequestStream) -> int:
        """Submits a request to the engine, and returns its id. Raises QueueFull or LlmcError."""
        request = stream.request
        more: dict[str, Any] = {} if stream.vector is None else {"vector": stream.vector}
        if request.adapter:
            more["adapter"] = request.adapter
        if request.placed:
            more["placed"] = request.placed
        given = request.given_token_ids
        if request.resumes is not None:
            more |= {"num_output_tokens": len(given), "output_index": request.resumes}
        deadline_ns = 0 if request.deadline_s is None else stream.started_ns + int(request.deadline_s * 1e9)
        try:
            engine_id = self.engine.submit(
                (*request.prompt_token_ids, *given) if given else request.prompt_token_ids,
                request.params,  # type: ignore[arg-type]  # has the fields of the engine's own parameters
                priority=request.priority,
                guided=request.guide is not None,
                num_prompt_logprobs=request.params.prompt_logprobs,
                deadline_ns=deadline_ns,
                **more,
            )
        except LlmcError as error:
            if error.name != "queue_full":
                raise
            raise self._queue_full() from error
        if request.adapter:
            self.adapters.count(request.adapter)
        # This thread takes the request's events, so none can arrive before it is registered.
        stream.cancel, stream.engine_id = partial(cancel, self.engine, engine_id), engine_id
        self._streams[engine_id] = stream
        self._emptied.clear()
        if request.guide is not None:
            self._guides.open(engine_id, request.guide, request.params.n)
        return engine_id

    def _queue_full(self) -> QueueFull:
        waiting, retry_after_s = self.num_waiting, self.retry_after_s()
        message = (
            f"the queue is full: {waiting} requests wait, the most allowed is {self._max_queue}: "
            f"try again in {retry_after_s} s, or raise --max-queue"
        )
        return QueueFull(message, retry_after_s)

    def _cancel_unsubmitted(self, stream: RequestStream) -> None:
        stream.end_unsubmitted()
        self._tell_record(stream)

    def _finish_output(self, engine_id: int, output_index: int, eos: npt.NDArray[np.uint32]) -> None:
        stream = self._streams.get(engine_id)
        if stream is None or stream.done:
            return
        stream.finish_output(output_index)
        if stream.done:
            cancel(self.engine, engine_id)
            return
        # The engine ends it by an eos, which is no longer reported, and frees its place.
        with contextlib.suppress(LlmcError):  # it ended meanwhile
            self.engine.set_token_mask(engine_id, output_index, eos)

    def _fail_request(self, engine_id: int, error: Exception) -> None:
        stream = self._streams.get(engine_id)
        if stream is not None:
            why = " ".join(str(error).split()) or type(error).__name__
            stream.fail(RequestFailure("guide", f"guided decoding failed: {why}"))
            cancel(self.engine, engine_id)

    def _fail_all(self) -> None:
        assert self.failure is not None
        self._tell_stepped()
        self._fail_streams(RequestFailure("internal", self.failure))
        for callback in self.on_failure:
            callback(self.failure)

    def _fail_streams(self, failure: RequestFailure) -> None:
        self._fail_unsubmitted(failure)
        for stream in self._streams.values():
            stream.fail(failure)
        self._streams.clear()
        self._emptied.set()

    def _fail_unsubmitted(self, failure: RequestFailure) -> None:
        for stream in self._backlog.clear():
            stream.cancel = None
            stream.fail(failure)
