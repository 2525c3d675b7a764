"""The Python API: an opened artifact, and batches of prompts run through its engine."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

from llmc.runtime.misses.handling import MissHandling

from .adapters.adapters import Adapters
from .beams import BeamSearchParams
from .binding import Artifact, Engine, GraphInfo
from .context_limit import ContextLimit
from .drafts import opened_draft
from .engine_loop import EngineLoop, Job
from .engine_steps import EngineSteps
from .frontend import Frontend, Lora, PreparedRequest
from .joining import join_graphs
from .opened import Opened, OpenedEngine, Opening
from .outputs import RequestOutput, TokenDelta
from .params import SamplingParams
from .prompts import Messages, Prompts, as_batch
from .vector_calls import VectorCalls
from .vector_task import VectorTask

OnOutput = Callable[[RequestOutput], None]
OnDelta = Callable[[TokenDelta], None]
Progress = Callable[[int, int, int], None]
"""Called after each engine step with (finished requests, all requests, tokens generated so far)."""


class LLM(Opened, VectorCalls):
    """An opened artifact with its own engine. Not thread-safe; close it, or use it as a context manager.

    path: artifact directory.
    num_threads: threads per step; 0 for every CPU that this process may use.
    pin_threads: whether each thread is bound to its own CPU.
    idle_spin_us: microseconds that idle threads spin before sleeping.
    max_num_seqs: most sequences run at once; 0 for the artifact's limit.
    max_tokens_per_step: most tokens of a step with prefill; 0 for the largest graph's.
    max_waiting: capacity of the engine's queue; 0 for 65536.
    priority_patience: steps that a request waits behind higher priorities; 0 for 512. Then the oldest request counts as
    highest.
    kv_bytes: bytes of the KV pool, or a size such as "2GiB"; 0 for max_num_seqs sequences of max_model_len, at most
    1 GiB. A pool smaller than max_model_len limits requests, with a warning.
    num_blocks: KV blocks of the pool; overrides kv_bytes.
    num_states: slots for the states of sequences, of a model whose layers have states; 0 for a part of kv_bytes.
    swap_bytes: bytes, or a size, of host memory for KV blocks of preempted sequences, on a device with its own memory;
    0 recomputes them.
    prefix_cache: whether to reuse KV blocks of equal prompt prefixes.
    speculate: speculative decoding, which changes no result. "ngram" or "ngram:K" takes draft tokens from prompt and
    output, at most K per step; "draft" or "draft:K" from the artifact `draft`. None: "draft" if there is one, else
    "off". miss_policy: what runs a step that no bucket holds. "background" also compiles the bucket in a
    lowest-priority process, adds it to the artifact, and lets its graph join this engine. Closing stops the
    compilation. on_bucket_news: callback for each such bucket, on another thread; None logs to `llmc.misses`.
    record_misses: file to which all misses are appended, for `llmc buckets misses`.
    weight_memory: where weights are read from, see WEIGHT_MEMORY; changes no result.
    device_options: options of the device. `eager` launches kernels one by one instead of replaying a graph. `ranks` is
    the number of ranks, or the CPUs of each: "0-7|8-15". The others are of OpenCL and CUDA devices. `device_number` is
    that of `llmc devices`, `program_cache` a folder, and `opencl_library` and `cuda_library` are paths. `graph_mib`
    limits the memory of recorded graphs. `overlap` False plans each step when the step before has ended; the bits
    are the same.
    chat_template: text of a chat template instead of the model's own, or the name of one of the model's.
    memory_utilization, graph_reserved_memory, graph_prompt_ratio: one budget for weights, graphs and KV pool, as the
    flags of `llmc serve`. The attribute `budget` has the result.
    skip_warmup: False warms every graph before the first request. True leaves that cost to a graph's first use.
    warmup_seconds: seconds for which the warm-up replays graphs; the rest is only walked through.
    on_warm_step: callback for each warmed graph.
    lora: LoRA adapters to load, name → path; the artifact must be compiled with --lora-slots.
    images: artifact that encodes images for this one; `llmc compile --images` makes both.
    Raises the binding's error if the artifact is invalid or cannot run on this machine; BudgetError; BucketError if the
    record cannot be written; ModelPathError for "background" without the compiler.
    """

    _misses: MissHandling | None = None

    def _open_engine(self, path: Path, opening: Opening) -> OpenedEngine:
        self.artifact: Any = Artifact(path)
        try:
            with opened_draft(opening.speculation.draft, path) as draft:
                miss_policy, guesses = opening.misses.of_engine, opening.speculation.engine_options()
                options = {"miss_policy": miss_policy, **guesses, **opening.engine_options}
                self.engine: Any = Engine(self.artifact, draft=draft, **options)
        except BaseException:
            self.artifact.close()
            raise
        try:
            self._setup(path, self.artifact.info, opening.chat_template, opening.engine_options)
        except BaseException:
            self.close()
            raise
        if opening.images is not None:
            try:
                self.tower = opening.tower(path, self.artifact.info)
            except BaseException:
                self.close()
                raise
        return OpenedEngine(self.engine, self.graphs, self.artifact.info)

    def _begin(self, opening: Opening) -> None:
        self._misses = MissHandling(self, opening.misses)

    def _abandon(self) -> None:
        self.close()

    def _setup(
        self, path: Path, info: Any, chat_template: str | None = None, options: Mapping[str, Any] | None = None
    ) -> None:
        limit = ContextLimit.of_engine(self.engine, info, options or {})
        task = VectorTask.of_artifact(path, int(info.vector_width))
        Frontend.__init__(self, path, int(info.vocab_size), limit, chat_template, task)
        self.adapters = Adapters(path, self.artifact, self.engine)
        self.graphs: list[GraphInfo] = list(self.artifact.graphs())
        self.max_num_seqs = int(info.max_num_seqs)
        self._steps = EngineSteps(self.engine)
        self._loop = EngineLoop(self.engine, self._steps, self.max_num_seqs)

    def generate(
        self,
        prompts: Prompts,
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        on_output: OnOutput | None = None,
        on_delta: OnDelta | None = None,
        progress: Progress | None = None,
        lora: Lora = None,
    ) -> list[RequestOutput]:
        """Runs a batch of prompts (texts, token id lists, conversations); returns their outputs in input order.

        With images a prompt is {"prompt": text, "images": […]}, or a conversation with parts of images. An image is a
        path, bytes, a data: URL, or an image of Pillow. Its place in a text is the model's placeholder, or the front.
        params: one for all, or one per prompt; None for `default_params()`.
        lora: name of a loaded adapter, one for all or one per prompt; None for the bare model.
        on_output: called with each output as its request finishes.
        on_delta: called after each step with the news of each continuation.
        All prompts are checked before any runs. Raises RequestError for one that has no tokens, is too long, or has
        token ids out of range. A request that the engine fails states the reason in its output's `error`; others
        continue. If a callback or a signal raises, running requests are cancelled and the exception propagates.
        """
        return self._run(self.prepare(prompts, params, lora=lora), on_output, on_delta, progress)

    def _run(
        self,
        requests: Sequence[PreparedRequest],
        on_output: OnOutput | None,
        on_delta: OnDelta | None,
        progress: Progress | None,
    ) -> list[RequestOutput]:
        """As `generate`."""
        outputs: list[RequestOutput | None] = [None] * len(requests)
        num_finished = num_tokens = 0

        def stepped(more: int) -> None:
            nonlocal num_tokens
            num_tokens += more
            if progress is not None:
                progress(num_finished, len(requests), num_tokens)

        with contextlib.closing(self._loop.run((Job(request, self.limit) for request in requests), stepped)) as steps:
            for jobs in steps:
                for job in jobs:
                    if on_delta is not None:
                        job.gather(on_delta)
                    if job.generation.done:
                        output = outputs[job.request.index] = job.output()
                        num_finished += 1
                        if on_output is not None:
                            on_output(output)
                if num_finished == len(requests):
                    stepped(0)
        return [output for output in outputs if output is not None]

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_variables: Mapping[str, Any] | None = None,
        on_output: OnOutput | None = None,
        on_delta: OnDelta | None = None,
        progress: Progress | None = None,
        lora: Lora = None,
    ) -> list[RequestOutput]:
        """`generate` for one conversation, or a list of them, rendered with the model's chat template.

        tools: JSON schemas of functions that the model may call. template_variables: further template variables, as in
        {"enable_thinking": False}. Also raises ChatTemplateError.
        """
        requests = self.prepare(as_batch(messages), params, tools, template_variables, lora, chat=True)
        return self._run(requests, on_output, on_delta, progress)

    def beam_search(
        self,
        prompts: Prompts,
        params: BeamSearchParams,
        *,
        progress: Progress | None = None,
        lora: Lora = None,
    ) -> list[RequestOutput]:
        """`generate` by beam search: the beam_width best outputs of each prompt, best first, with logprobs."""
        return self.generate(prompts, params.sampling(), progress=progress, lora=lora)

    def stream(
        self,
        prompts: Prompts,
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_variables: Mapping[str, Any] | None = None,
        lora: Lora = None,
    ) -> Generator[TokenDelta, None, None]:
        """Streams the output of one or several prompts or conversations; each delta names its prompt and output.

        Arguments and errors are those of `generate` and `chat`; prompts are checked immediately. A request that the
        engine fails ends with a delta that has an `error`. Closing the iterator cancels running requests. Several
        iterators may be open.
        """
        return self._deltas(self.prepare(prompts, params, tools, template_variables, lora))

    def load_adapter(self, name: str, path: str | Path) -> None:
        """Loads a LoRA adapter in PEFT's format, for requests to select by name. Raises AdapterError, and then changes
        nothing."""
        self.adapters.load(name, Path(path))

    def unload_adapter(self, name: str) -> None:
        """New requests no longer find the adapter; running ones finish with it. Raises AdapterError for an unknown
        name."""
        self.adapters.unload(name)

    def _deltas(self, requests: Sequence[PreparedRequest]) -> Generator[TokenDelta, None, None]:
        with contextlib.closing(self._loop.run(Job(request, self.limit) for request in requests)) as steps:
            for jobs in steps:
                for job in jobs:
                    while (delta := job.generation.next_delta()) is not None:
                        yield delta

    def stats(self) -> Any:
        """Counters of the engine since it was opened (binding.EngineStats)."""
        return self.engine.stats

    def graph_use(self) -> list[dict[str, Any]]:
        """Graphs that were replayed: {"graph": "decode:4x512", "replays": …, "tokens": valid tokens}."""
        uses = zip(self.graphs, self.engine.graph_use(), strict=False)  # a graph may join between the two calls
        return [
            {"graph": str(graph.bucket), "replays": replays, "tokens": tokens}
            for graph, (replays, tokens) in uses
            if replays
        ]

    def add_graphs(self, path: Path) -> int:
        """Takes over the new graphs of `path`, this artifact with buckets added; returns their number. Thread-safe.

        Changes no result. Raises LlmcError; the engine then continues with its present graphs.
        """
        num_new = join_graphs(self.engine, self.graphs, path)
        self.warm_up.joined(self.graphs[len(self.graphs) - num_new :])
        return num_new

    def close(self) -> None:
        """Stops background compilation, and releases engine and artifact; idempotent."""
        if self._misses is not None:
            self._misses.close()
        if self.tower is not None:
            self.tower.close()
        self.engine.close()
        self.artifact.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
