"""Shared by `LLM` and `AsyncLLM`: tokenizer, sampling defaults, and validation of all prompts before any runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from llmc.runtime.guided.compiler import GuideCompiler, TokenGuide
from llmc.runtime.guided.constraint import Guided
from llmc.runtime.images.image_prompt import ImagePrompt, chat_prompt, text_prompt
from llmc.runtime.images.sources import from_python
from llmc.runtime.text.detokenizer import Decode
from llmc.runtime.text.tokenizer import Tokenizer, TokenizerError, read_generation_config

from .context_limit import ContextLimit
from .gathered import Gathered
from .generation import Generation, decoder
from .outputs import RequestOutput, Timings, Usage
from .params import SamplingParams
from .prompts import GivenPrompt, Messages, Prompts, as_batch, checked_ids, given_prompt
from .request_error import RequestError
from .vector_task import VectorTask

if TYPE_CHECKING:
    from llmc.runtime.binding.placed_rows import PlacedRows
    from llmc.runtime.images.tower import Tower

    from .adapters.adapters import Adapters

Lora: TypeAlias = "str | Sequence[str | None] | None"
"""Name of a LoRA adapter for all prompts, or one per prompt; None for the bare model."""


@dataclass(frozen=True)
class PreparedRequest:
    """A validated prompt. text: None if it was not given as text. make_guide: makes a guide per continuation. adapter:
    the engine's number; 0 for none. images: those of the prompt. rows: of the images, if they are encoded."""

    index: int
    text: str | None
    token_ids: list[int]
    params: SamplingParams
    decode: Decode
    make_guide: Callable[[], TokenGuide] | None
    adapter: int = 0
    images: ImagePrompt | None = None
    rows: tuple[PlacedRows, ...] | None = None

    def placed(self) -> tuple[PlacedRows, ...]:
        """Rows that take the place of tokens. Encodes the images unless that is done, which takes long."""
        if self.rows is not None:
            return self.rows
        return () if self.images is None else self.images.placed(self.token_ids) or ()

    def encoded(self) -> PreparedRequest:
        """The request with its rows, so that `placed` takes no time."""
        return replace(self, rows=self.placed())

    def generation(self, limit: ContextLimit) -> Generation:
        """The object that takes the engine's events of this request."""
        return Generation(self.token_ids, self.params, self.decode, limit, self.index)

    def output(self, gathered: Gathered, timings: Timings) -> RequestOutput:
        """The finished request."""
        asked = self.params.prompt_logprobs is not None
        return RequestOutput(
            index=self.index,
            prompt=self.text,
            prompt_token_ids=tuple(self.token_ids),
            outputs=gathered.outputs,
            usage=Usage(len(self.token_ids), gathered.num_tokens, gathered.num_cached_tokens),
            timings=timings,
            error=gathered.error,
            prompt_logprobs=(gathered.prompt_logprobs or ()) if asked else None,
        )


class Frontend:
    """Prompts of an artifact. max_model_len: most tokens of a request, prompt plus output; see `limit`. vector_task:
    None for a model that generates text. adapters: of the engine. tower: sees images; None: prompts have none."""

    adapters: Adapters
    tower: Tower | None = None

    def __init__(
        self,
        path: Path,
        vocab_size: int,
        limit: ContextLimit,
        chat_template: str | None = None,
        vector_task: VectorTask | None = None,
    ) -> None:
        self.path = path
        self.vocab_size = vocab_size
        self.vector_task = vector_task
        self.limit = limit
        self.max_model_len = limit.tokens
        self.generation_config = read_generation_config(path)
        self._tokenizer: Tokenizer | None = None
        self._chat_template = chat_template
        self._guide_compiler: GuideCompiler | None = None

    @property
    def tokenizer(self) -> Tokenizer:
        """The artifact's tokenizer, read on first use. Raises TokenizerError if there is none."""
        if self._tokenizer is None:
            self._tokenizer = Tokenizer(self.path, self._chat_template)
        return self._tokenizer

    @property
    def writes_text(self) -> bool:
        """Whether there is a tokenizer: else outputs are token ids."""
        return self._tokenizer is not None or (self.path / "tokenizer.json").exists()

    def default_params(self, **overrides: Any) -> SamplingParams:
        """The model's own sampling defaults (generation_config.json), overridden by those `overrides` that are not
        None."""
        return SamplingParams.from_generation_config(self.generation_config, **overrides)

    def encode_chat(self, messages: Messages, /, **options: Any) -> list[int]:
        """Token ids of a conversation up to the start of the assistant's answer; options as for
        ChatTemplates.render."""
        return self._read_chat(messages, **options)[0]

    def _read_chat(self, messages: Messages, /, **options: Any) -> tuple[list[int], ImagePrompt]:
        """Token ids of a conversation, and its images."""

        def render(plain: Messages, placeholder: str | None) -> str:
            return self.tokenizer.apply_chat_template(plain, placeholder, **options)

        prompt = chat_prompt(self.tower, messages, options, render, from_python)
        # The template itself writes the special tokens.
        ids = self.tokenizer.encode(prompt.text, add_special_tokens=False)
        prompt.check(ids)
        return ids, prompt

    def _read_text(self, text: str, images: Sequence[Any]) -> tuple[list[int], ImagePrompt]:
        prompt = text_prompt(self.tower, text, images, from_python)
        ids = self.tokenizer.encode_prompt(prompt.text)
        prompt.check(ids)
        return ids, prompt

    def prepare(
        self,
        prompts: Prompts,
        params: SamplingParams | Sequence[SamplingParams] | None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_variables: Mapping[str, Any] | None = None,
        lora: Lora = None,
        *,
        chat: bool = False,
    ) -> list[PreparedRequest]:
        """Validates all prompts. params: one for all, one each, or None for the model's defaults. lora: name of an
        adapter for all, or one each. chat: every prompt is a conversation. Images are looked at, and not yet encoded.
        Raises RequestError."""
        if self.vector_task is not None:
            self.vector_task.must_be("generate")
        items = as_batch(prompts)
        if isinstance(params, SamplingParams) or params is None:
            all_params = [self.default_params() if params is None else params] * len(items)
        else:
            given: Any = params
            all_params = list(given) if isinstance(given, (list, tuple)) else [given]
            if len(all_params) != len(items):
                raise RequestError(f"{len(all_params)} sampling params for {len(items)} prompts: give one, or one each")
            for one in all_params:
                if not isinstance(one, SamplingParams):
                    raise RequestError(f"the sampling params are {one!r}: give SamplingParams, for all or for each")
        variables = dict(template_variables or {})
        prepared = []
        for index, (item, one) in enumerate(zip(items, all_params, strict=True)):
            prompt = GivenPrompt(item, True) if chat else given_prompt(index, item)
            prepared.append(self._prepare(index, prompt, one, {**variables, "tools": prompt.tools or tools}))
        adapters = self._adapter_ids(lora, len(items))
        return [replace(one, adapter=adapter) for one, adapter in zip(prepared, adapters, strict=True)]

    def _adapter_ids(self, lora: Lora, count: int) -> list[int]:
        """The engine's adapter numbers for `count` prompts."""
        names = [lora] * count if lora is None or isinstance(lora, str) else list(lora)
        if len(names) != count:
            raise RequestError(f"{len(names)} names of adapters for {count} prompts: give one, or one each")
        return [0 if name is None else self.adapters.id_of(name) for name in names]

    def _prepare(
        self, index: int, prompt: GivenPrompt, params: SamplingParams, rendering: Mapping[str, Any]
    ) -> PreparedRequest:
        text = prompt.given if isinstance(prompt.given, str) else None
        ids, images = prompt.given, None
        if prompt.is_chat:
            ids, images = self._read_chat(prompt.given, **rendering)
        elif text is not None:
            ids, images = self._read_text(text, prompt.images)
        token_ids = checked_ids(index, ids, self.vocab_size, self.limit)
        tokenizer: Tokenizer | None = None
        try:
            tokenizer = self.tokenizer
        except TokenizerError:
            # Prompts of token ids run without a tokenizer, but not with a damaged one; only text needs it.
            if text is not None or params.stop or (self.path / "tokenizer.json").exists():
                raise
        guide = self._guide_maker(params)
        return PreparedRequest(index, text, token_ids, params, decoder(tokenizer, params), guide, images=images)

    def _guide_maker(self, params: SamplingParams) -> Callable[[], TokenGuide] | None:
        """Makes guides, one per continuation; None for an unguided request."""
        if params.guided is None:
            return None
        if not isinstance(params.guided, Guided):
            raise RequestError(f"guided is {params.guided!r}: make it with a method of Guided, as Guided.json_schema")
        if self._guide_compiler is None:
            self._guide_compiler = GuideCompiler.of_artifact(self.path, self.vocab_size)
        return self._guide_compiler.compile(params.guided)
