"""The Python API: an artifact, opened, and batches of prompts run through its engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from .binding import MISS_POLICIES, WEIGHT_MEMORY, Artifact, Engine, GraphInfo, LlmcError
from .detokenizer import OutputText
from .guides import GuideCompiler, Guided, GuideError, TokenGuide
from .joining import join_graphs
from .outputs import CompletionOutput, RequestFailure, RequestOutput, Timings, TokenLogprob, Usage, failure_at
from .params import RequestError, SamplingParams
from .tokenizer import Tokenizer, TokenizerError, read_generation_config, read_model_type

# What the engine may refuse in one request that the checks here cannot see; any other error is the engine's own.
_REFUSALS = ("invalid_argument", "out_of_range", "out_of_memory")
OnOutput = Callable[[RequestOutput], None]
Progress = Callable[[int, int, int], None]
"""Called after each engine step with (finished requests, all requests, tokens generated so far)."""


class LLM:
    """An opened artifact with an engine of its own; not thread-safe, close it or use it as a context manager.

    path: artifact directory. num_threads 0: every CPU this process may use. kv_bytes: bytes of the KV pool, 0: enough
    for max_num_seqs sequences of max_model_len, at most 1 GiB. max_num_seqs 0: the artifact's. max_tokens_per_step:
    tokens of a step with prefill, 0: the largest graph. miss_policy: "larger", "split" or "error".
    weight_memory: "auto", "mapped" or "copied", see WEIGHT_MEMORY; changes no result. chat_template: the text of one
    instead of the model's own.
    Raises the binding's error when the artifact is not valid or does not run on this machine.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        num_threads: int = 0,
        num_blocks: int = 0,
        kv_bytes: int = 0,
        max_num_seqs: int = 0,
        max_tokens_per_step: int = 0,
        prefix_cache: bool = True,
        miss_policy: str = "larger",
        weight_memory: str = "auto",
        chat_template: str | None = None,
    ) -> None:
        if miss_policy not in MISS_POLICIES:
            raise RequestError(f"miss policy {miss_policy!r} is unknown: use {', '.join(MISS_POLICIES)}")
        if weight_memory not in WEIGHT_MEMORY:
            raise RequestError(f"weight memory {weight_memory!r} is unknown: use {', '.join(WEIGHT_MEMORY)}")
        self.path = Path(path)
        self.artifact: Any = Artifact(self.path)
        try:
            self.engine: Any = Engine(
                self.artifact,
                num_threads=num_threads,
                num_blocks=num_blocks,
                kv_bytes=kv_bytes,
                max_num_seqs=max_num_seqs,
                max_tokens_per_step=max_tokens_per_step,
                prefix_cache=prefix_cache,
                miss_policy=miss_policy,
                weight_memory=weight_memory,
            )
        except BaseException:
            self.artifact.close()
            raise
        self._setup(self.artifact.info, chat_template)

    def _setup(self, info: Any, chat_template: str | None = None) -> None:
        self.graphs: list[GraphInfo] = list(self.artifact.graphs())
        self.max_model_len = int(info.max_model_len)
        self.vocab_size = int(info.vocab_size)
        self.max_num_seqs = int(info.max_num_seqs)
        self._tokenizer: Tokenizer | None = None
        self._chat_template = chat_template
        self._guide_compiler: GuideCompiler | None = None
        self.generation_config = read_generation_config(self.path)

    @property
    def tokenizer(self) -> Tokenizer:
        """The artifact's tokenizer, read at first use. Raises TokenizerError when it has none."""
        if self._tokenizer is None:
            self._tokenizer = Tokenizer(self.path, self._chat_template)
        return self._tokenizer

    @property
    def model_type(self) -> str | None:
        """The family that the artifact was compiled from; None when its manifest does not say."""
        return read_model_type(self.path)

    def default_params(self, **overrides: Any) -> SamplingParams:
        """The model's own sampling defaults (generation_config.json) with `overrides` that are not None."""
        return SamplingParams.from_generation_config(self.generation_config, **overrides)

    def generate(
        self,
        prompts: str | Sequence[str] | Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        on_output: OnOutput | None = None,
        progress: Progress | None = None,
    ) -> list[RequestOutput]:
        """Runs a batch of prompts (texts, or lists of token ids) and returns their outputs in input order.

        params: one for all or one a prompt; None: `default_params()`. on_output is called as each request finishes, in
        that order. Every prompt is checked before any runs: raises RequestError for one that is empty, too long or has
        token ids out of range. A request that the engine fails says why in its output's `error`; the others go on.
        When a callback or a signal raises, what still runs is cancelled and the error goes on.
        """
        items: list[Any] = [prompts] if isinstance(prompts, str) else list(prompts)
        if isinstance(params, SamplingParams) or params is None:
            shared = self.default_params() if params is None else params
            all_params = [shared] * len(items)
        else:
            all_params = list(params)
            if len(all_params) != len(items):
                raise RequestError(f"{len(all_params)} sampling params for {len(items)} prompts: give one, or one each")
        requests = [self._request(i, item, p) for i, (item, p) in enumerate(zip(items, all_params, strict=True))]
        return self._run(requests, on_output, progress)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_variables: Mapping[str, Any] | None = None,
        on_output: OnOutput | None = None,
        progress: Progress | None = None,
    ) -> list[RequestOutput]:
        """`generate` for one conversation, or a list of them, rendered with the model's chat template.

        tools: JSON schemas of functions the model may call. template_variables: what else the template reads, as in
        {"enable_thinking": False}. Raises RequestError and ChatTemplateError as well.
        """
        if messages and isinstance(messages[0], Mapping):
            conversations: list[Any] = [messages]
        else:
            conversations = list(messages)
        variables = dict(template_variables or {})
        prompts = [self.encode_chat(conversation, tools=tools, **variables) for conversation in conversations]
        return self.generate(prompts, params, on_output=on_output, progress=progress)

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
        """Token ids of a conversation up to where the assistant's answer starts; options as ChatTemplates.render's."""
        text = self.tokenizer.apply_chat_template(messages, **options)
        # The template writes the special tokens itself.
        return self.tokenizer.encode(text, add_special_tokens=False)

    def stats(self) -> Any:
        """Counters of the engine since it was opened (binding.EngineStats)."""
        return self.engine.stats

    def graph_use(self) -> list[dict[str, Any]]:
        """Graphs that were replayed: {"graph": "decode:4x512", "replays": …, "tokens": valid tokens carried}."""
        uses = zip(self.graphs, self.engine.graph_use(), strict=False)  # a graph may join between the two
        return [
            {"graph": f"{graph.phase}:{graph.batch}x{graph.seq}", "replays": replays, "tokens": tokens}
            for graph, (replays, tokens) in uses
            if replays
        ]

    def add_graphs(self, path: Path) -> int:
        """Takes over the graphs of `path`, this artifact with buckets added, and returns how many; from any thread.

        Changes no result. Raises LlmcError; the engine then goes on with the graphs it has.
        """
        return join_graphs(self.engine, self.graphs, path)

    def close(self) -> None:
        """Releases engine and artifact; may be called twice."""
        self.engine.close()
        self.artifact.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _request(self, index: int, item: Any, params: SamplingParams) -> _Request:
        text = item if isinstance(item, str) else None
        token_ids = self.tokenizer.encode(text) if text is not None else list(item)
        where = f"prompt {index}"
        if not token_ids:
            raise RequestError(f"{where} has no tokens: give at least one")
        for token in token_ids:
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < self.vocab_size:
                raise RequestError(f"{where} has token id {token!r}: use whole numbers from 0 to {self.vocab_size - 1}")
        if len(token_ids) >= self.max_model_len:
            raise RequestError(
                f"{where} has {len(token_ids)} tokens and max-model-len is {self.max_model_len}: shorten it to at most "
                f"{self.max_model_len - 1}, or compile with a larger --max-model-len"
            )
        decode: Callable[[Sequence[int]], str] = _no_text
        try:
            decode = self.tokenizer.decode
        except TokenizerError:
            # Prompts of token ids run without a tokenizer; only text needs one.
            if text is not None or params.stop:
                raise
        return _Request(index, text, token_ids, params, decode, self._guide_maker(params))

    def _guide_maker(self, params: SamplingParams) -> Callable[[], TokenGuide] | None:
        """Makes the guide of a continuation; None for a request without."""
        if params.guided is None:
            return None
        if not isinstance(params.guided, Guided):
            raise RequestError(f"guided is {params.guided!r}: make it with a method of Guided, as Guided.json_schema")
        if self._guide_compiler is None:
            self._guide_compiler = GuideCompiler.of_artifact(self.path, self.vocab_size)
        return self._guide_compiler.compile(params.guided)

    def _run(
        self, requests: list[_Request], on_output: OnOutput | None, progress: Progress | None
    ) -> list[RequestOutput]:
        outputs: list[RequestOutput | None] = [None] * len(requests)
        waiting = iter(requests)
        running: dict[int, _Request] = {}
        # Enough to keep the engine's queue full, few enough that a million prompts do not sit in it.
        window = 4 * self.max_num_seqs + 64
        num_finished = num_tokens = 0

        def finish(request: _Request) -> None:
            nonlocal num_finished
            output = outputs[request.index] = request.output()
            num_finished += 1
            if on_output is not None:
                on_output(output)

        try:
            while num_finished < len(requests):
                while len(running) < window and (request := next(waiting, None)) is not None:
                    request.submit_ns = time.monotonic_ns()
                    try:
                        running[self._submit(request)] = request
                    except LlmcError as error:
                        if error.name not in _REFUSALS:
                            raise
                        request.fail(RequestFailure(error.name, str(error)))
                        finish(request)
                progressed = self.engine.step()
                events = self.engine.poll()
                stopped: list[int] = []
                for event in events:
                    current = running.get(event.request_id)
                    if current is None:
                        continue
                    num_tokens += event.kind == "token"
                    if event.kind == "needs_mask":
                        self._set_mask(current, event)
                    else:
                        current.take(event)
                    if not current.done:
                        continue
                    del running[event.request_id]
                    current.guides = []
                    if not current.engine_done:
                        stopped.append(event.request_id)
                    finish(current)
                self._cancel(stopped)
                if progress is not None:
                    progress(num_finished, len(requests), num_tokens)
                if not progressed and not events and running:
                    raise RuntimeError(f"the engine stands still with {len(running)} requests running")
        except BaseException:
            self._cancel(running)
            while self.engine.step():
                self.engine.poll()
            self.engine.poll()
            raise
        return [output for output in outputs if output is not None]

    def _submit(self, request: _Request) -> int:
        params = request.params
        wants: dict[str, Any] = {}
        if params.prompt_logprobs is not None:
            wants["num_prompt_logprobs"] = params.prompt_logprobs
        if request.make_guide is not None:
            wants["guided"] = True
            # Not sooner: a guide takes memory, and a million requests may wait.
            request.guides = [request.make_guide() for _ in range(params.n)]
        return int(self.engine.submit(request.token_ids, params, **wants))

    def _set_mask(self, request: _Request, event: Any) -> None:
        try:
            mask = request.guides[event.output_index].mask()
        except GuideError as error:
            request.fail(RequestFailure("guide", str(error)))
            return
        self.engine.set_token_mask(event.request_id, event.output_index, mask)

    def _cancel(self, request_ids: Iterable[int]) -> None:
        for request_id in request_ids:
            try:
                self.engine.cancel(request_id)
            except LlmcError as error:
                # It finished in the very step whose tokens ended it here.
                if error.name != "not_found":
                    raise


def _token_logprob(event: Any) -> TokenLogprob:
    return TokenLogprob(event.token_id, event.logprob, dict(event.top_logprobs), event.rank)


def _no_text(token_ids: Sequence[int]) -> str:
    return ""


class _Continuation:
    """Tokens and text of one of the n outputs of a request."""

    def __init__(self, text: OutputText) -> None:
        self.text = text
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.finish_reason = ""
        self.stop_reason: str | int | None = None


class _Request:
    """A prompt on its way through the engine, and what came back so far."""

    def __init__(
        self,
        index: int,
        prompt: str | None,
        token_ids: list[int],
        params: SamplingParams,
        decode: Callable[[Sequence[int]], str],
        make_guide: Callable[[], TokenGuide] | None = None,
    ) -> None:
        self.index = index
        self.prompt = prompt
        self.token_ids = token_ids
        self.params = params
        self.make_guide = make_guide
        self.guides: list[TokenGuide] = []
        self.submit_ns = 0
        self._outputs = [
            _Continuation(OutputText(decode, token_ids, params.stop, params.min_tokens)) for _ in range(params.n)
        ]
        self._prompt_logprobs: list[TokenLogprob] = []
        self._first_ns = self._last_ns = 0
        self._cached = 0
        self._error: RequestFailure | None = None
        self._failed_by_engine = False
        self._finished_by_engine = 0

    @property
    def done(self) -> bool:
        return all(output.finish_reason for output in self._outputs)

    @property
    def engine_done(self) -> bool:
        """False when a stop string or a guide ended the text while the engine would go on."""
        return self._failed_by_engine or self._finished_by_engine == len(self._outputs)

    def take(self, event: Any) -> None:
        """Takes one event of the engine (fields of llmc_event)."""
        self._cached = max(self._cached, event.num_cached_tokens)
        if event.kind == "failed":
            num_output_tokens = max(len(output.token_ids) for output in self._outputs)
            self._failed_by_engine = True
            self.fail(failure_at(event, len(self.token_ids), num_output_tokens))
            return
        if event.kind == "prompt_logprobs":
            self._prompt_logprobs.append(_token_logprob(event))
            return
        output = self._outputs[event.output_index]
        if event.kind == "finished":
            self._finished_by_engine += 1
            if event.finish_reason == "stop" and event.token_id >= 0 and not output.finish_reason:
                output.stop_reason = event.token_id
            self._finish(output, event.finish_reason or "stop")
            return
        if output.finish_reason:
            return
        self._first_ns = self._first_ns or event.time_ns
        self._last_ns = event.time_ns
        if self.guides:
            try:
                self.guides[event.output_index].accept(event.token_id)
            except GuideError as error:
                self.fail(RequestFailure("guide", str(error)))
                return
        output.token_ids.append(event.token_id)
        if self.params.logprobs is not None:
            output.logprobs.append(_token_logprob(event))
        output.text.push(event.token_id)
        if output.text.stop_reason is not None:
            self._finish(output, "stop")

    def fail(self, failure: RequestFailure) -> None:
        """Ends all continuations that still run."""
        self._error = failure
        for output in self._outputs:
            self._finish(output, "error")

    def _finish(self, output: _Continuation, reason: str) -> None:
        if output.finish_reason:
            return
        output.text.finish()
        if output.text.stop_reason is not None:
            output.stop_reason = output.text.stop_reason
            reason = "stop"
        output.finish_reason = reason

    def output(self) -> RequestOutput:
        num_tokens = sum(len(output.token_ids) for output in self._outputs)
        # With n > 1 the continuations run side by side: a token time is that of one of them.
        steps = max(len(output.token_ids) for output in self._outputs) - 1
        return RequestOutput(
            index=self.index,
            prompt=self.prompt,
            prompt_token_ids=tuple(self.token_ids),
            outputs=tuple(
                CompletionOutput(
                    index=i,
                    text=output.text.text,
                    token_ids=tuple(output.token_ids),
                    finish_reason=output.finish_reason,
                    stop_reason=output.stop_reason,
                    logprobs=None if self.params.logprobs is None else tuple(output.logprobs),
                )
                for i, output in enumerate(self._outputs)
            ),
            usage=Usage(len(self.token_ids), num_tokens, self._cached),
            timings=Timings(
                ttft_s=(self._first_ns - self.submit_ns) / 1e9 if self._first_ns else None,
                tpot_s=(self._last_ns - self._first_ns) / 1e9 / steps if steps > 0 else None,
                total_s=(time.monotonic_ns() - self.submit_ns) / 1e9,
            ),
            error=self._error,
            prompt_logprobs=None if self.params.prompt_logprobs is None else tuple(self._prompt_logprobs),
        )
