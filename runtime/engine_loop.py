"""The engine loop for requests that wait in one thread: steps the engine, and dispatches events to requests."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any

from llmc.runtime.binding.events import Event
from llmc.runtime.binding.handle import LlmcError
from llmc.runtime.binding.placed_rows import PlacedRows
from llmc.runtime.guided.compiler import GuideError
from llmc.runtime.guided.setting import set_masks
from llmc.runtime.guided.shared_guides import SharedGuides
from llmc.runtime.images.image_error import ImageError

from .context_limit import ContextLimit
from .engine_steps import EngineSteps, cancel
from .frontend import PreparedRequest
from .gathered import Gathered
from .outputs import RequestFailure, RequestOutput, TokenDelta

# Errors that the engine may raise for one request, and earlier checks cannot foresee; others are the engine's own. Not
# found means that an adapter was unloaded meanwhile.
REFUSALS = ("invalid_argument", "not_found", "out_of_range", "out_of_memory")
# After this error of an image, no other one can be encoded. Any other is of its request alone, as in steps.
_LOST = "device_lost"


_QUEUE_FULL = "queue_full"
_MOST_ROW_BYTES = 1 << 30
"""Of images whose requests wait in the engine: one of them may take 60 MB."""
OnStep = Callable[[int], None]


def _placed(request: PreparedRequest) -> Sequence[PlacedRows] | RequestFailure:
    """The rows of a request's images, or why there are none for it alone. Raises LlmcError if the device is lost."""
    try:
        return request.placed()
    except ImageError as error:
        return RequestFailure("invalid_image", str(error))
    except MemoryError:
        return RequestFailure("out_of_memory", "no memory is left to read and encode the images: give smaller ones")
    except LlmcError as error:
        if error.name == _LOST:
            raise
        return RequestFailure(error.name, str(error))


class Job:
    """A request in progress. gathered: deltas taken by `gather`."""

    def __init__(self, request: PreparedRequest, limit: ContextLimit) -> None:
        self.request = request
        self.generation = request.generation(limit)
        self.gathered = Gathered(request.params)
        self.engine_id: int | None = None
        self.submit_ns = 0
        self.row_bytes = 0
        make = request.make_guide
        self.guides = None if make is None else SharedGuides(make, request.params.n)
        self.told = False

    def gather(self, told: Callable[[TokenDelta], None] | None = None) -> None:
        """Takes the pending deltas, and reports them."""
        self.gathered.take_all(self.generation, told)

    def output(self) -> RequestOutput:
        """The finished request."""
        self.gather()
        return self.request.output(self.gathered, self.generation.timings(self.submit_ns))

    def take(self, event: Event) -> None:
        """Takes an event of this request."""
        self.generation.take(event)
        if self.guides is None:
            return
        if event.kind == "finished":
            self.guides.drop(event.output_index)
        elif event.kind == "token":
            try:
                self.guides.accept(event.output_index, event.token_id)
            except GuideError as error:
                self.generation.fail(RequestFailure("guide", str(error)))


class EngineLoop:
    """Runs jobs through `engine`. Several runs may be open at once; each step serves them all. steps: of the engine."""

    def __init__(self, engine: Any, steps: EngineSteps, max_num_seqs: int) -> None:
        self._engine, self._steps, self._max_num_seqs = engine, steps, max_num_seqs
        # Enough to keep the engine's queue full, few enough that a million prompts do not fill it.
        self._window = 4 * max_num_seqs + 64
        self._jobs: dict[int, tuple[Job, list[Job]]] = {}

    def run(
        self, jobs: Iterable[Job], stepped: Callable[[int], None] | None = None
    ) -> Generator[list[Job], None, None]:
        """Runs `jobs`; after each step yields those with news, and each a last time when it is done.

        stepped: called after each step with its number of tokens. Closing the generator, or any exception, cancels
        running jobs.
        """
        waiting = iter(jobs)
        refused: Job | None = None  # the queue was full
        running: dict[int, Job] = {}
        news: list[Job] = []
        row_bytes = 0
        try:
            while True:
                while self._has_room(len(running), row_bytes) and (job := refused or next(waiting, None)) is not None:
                    refused = None if self._submit(job) else job
                    if refused is not None:
                        break
                    if job.engine_id is None:
                        news.append(job)
                    else:
                        running[job.engine_id] = job
                        row_bytes += job.row_bytes
                        self._jobs[job.engine_id] = job, news
                if not running and not news and refused is None:
                    return
                if not news:
                    num_tokens = self._step()
                    if stepped is not None:
                        stepped(num_tokens)
                if news:
                    fresh = news[:]
                    news.clear()
                    for job in fresh:
                        job.told = False
                        engine_id = job.engine_id if job.generation.done else None
                        if engine_id is not None and running.pop(engine_id, None) is not None:
                            row_bytes -= job.row_bytes
                    yield fresh
        finally:
            self._abandon(running)

    def _has_room(self, num_running: int, row_bytes: int) -> bool:
        """Whether the engine shall have one more request. row_bytes: of those that it has."""
        return num_running < (self._window if row_bytes < _MOST_ROW_BYTES else self._max_num_seqs)

    def _step(self) -> int:
        """Runs one engine step; returns its number of tokens. Raises LlmcError unless the engine survives it."""
        progressed = self._steps.step()
        events = self._engine.poll()
        num_tokens = 0
        for event in events:
            job, news = self._jobs.get(event.request_id, (None, None))
            if job is None or news is None:
                continue
            num_tokens += event.kind == "token" or (event.kind == "finished" and event.token_id >= 0)
            if event.kind == "needs_mask":
                self._set_mask(job, event)
            else:
                job.take(event)
            if not job.told:
                job.told = True
                news.append(job)
            if job.generation.done:
                del self._jobs[event.request_id]
                job.guides = None
                if not job.generation.engine_done:
                    cancel(self._engine, event.request_id)
        if not progressed and not events and self._jobs:
            raise RuntimeError(f"the engine stands still with {len(self._jobs)} requests running")
        return num_tokens

    def _submit(self, job: Job) -> bool:
        """Submits the job; one without an id was refused by the engine, and has failed. False if the queue is full."""
        request = job.request
        wants: dict[str, Any] = {}
        if request.params.prompt_logprobs is not None:
            wants["num_prompt_logprobs"] = request.params.prompt_logprobs
        if request.make_guide is not None:
            wants["guided"] = True
        if request.adapter:
            wants["adapter"] = request.adapter
        # Only now: the rows of thousands of waiting requests would fill the memory.
        placed = _placed(request)
        if isinstance(placed, RequestFailure):
            job.generation.fail(placed)
            return True
        if placed:
            wants["placed"] = placed
            job.row_bytes = sum(one.rows.nbytes for one in placed)
        job.submit_ns = time.monotonic_ns()
        try:
            job.engine_id = int(self._engine.submit(request.token_ids, request.params, **wants))
        except LlmcError as error:
            if error.name == _QUEUE_FULL:
                return False
            if error.name not in REFUSALS:
                raise
            job.generation.fail(RequestFailure(error.name, str(error)))
        return True

    def _set_mask(self, job: Job, event: Event) -> None:
        assert job.guides is not None
        try:
            if job.guides.finished(event.output_index):
                # The text is complete. The engine ends it by an eos, which is no longer reported.
                job.generation.finish_output(event.output_index)
            set_masks(self._engine, event.request_id, event.output_index, job.guides)
        except GuideError as error:
            job.generation.fail(RequestFailure("guide", str(error)))

    def _abandon(self, running: Iterable[int]) -> None:
        """Cancels requests that still run and are no longer awaited."""
        left = [engine_id for engine_id in running if self._jobs.pop(engine_id, None) is not None]
        for engine_id in left:
            cancel(self._engine, engine_id)
        # Steps of other runs also process the cancellations.
        while left and not self._jobs and self._steps.step():
            self._engine.poll()
        if left and not self._jobs:
            self._engine.poll()
