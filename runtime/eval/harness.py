"""An artifact as a model of lm-evaluation-harness; imported only if lm_eval is installed and requested."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

from llmc.runtime.eval.scorer import Scorer
from llmc.runtime.llm import LLM
from llmc.runtime.params import SamplingParams
from llmc.runtime.request_error import RequestError
from llmc.runtime.text.tokenizer import Tokenizer

_MAX_GEN_TOKENS = 256  # what the harness's other models generate without a task setting
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed")
Pair = tuple[Any, list[int], list[int]]


class HarnessModel(TemplateLM):  # type: ignore[misc]
    """Scores by replaying graphs (Scorer), generates with the engine; each is opened on first use."""

    def __init__(self, path: Path, num_threads: int = 0) -> None:
        """Raises TokenizerError for an artifact without a tokenizer."""
        super().__init__()
        self.path, self._num_threads = path, num_threads
        self._tokens = Tokenizer(path)

    @cached_property
    def _scorer(self) -> Scorer:
        return Scorer(self.path, self._num_threads)

    @cached_property
    def _llm(self) -> LLM:
        return LLM(self.path, num_threads=self._num_threads)

    def close(self) -> None:
        """Releases what was opened."""
        for name in ("_scorer", "_llm"):
            if name in self.__dict__:
                self.__dict__.pop(name).close()

    @property
    def eot_token_id(self) -> int:
        eos: list[int] = [token for token in self._tokens.eos_token_ids if token is not None]
        return eos[0] if eos else self._prefix

    @property
    def prefix_token_id(self) -> int:
        return self._prefix

    @cached_property
    def _prefix(self) -> int:
        """The token before a text without context."""
        for token in (self._tokens.bos_token_id, *self._tokens.eos_token_ids):
            if token is not None:
                return int(token)
        raise RequestError(f"{self.path} has neither a BOS nor an EOS token to begin a text with")

    @property
    def max_length(self) -> int:
        return self._scorer.max_model_len

    @property
    def tokenizer_name(self) -> str:
        return str(self.path)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        if add_special_tokens is None:
            # A text from a chat template may already contain it.
            bos = self._tokens.bos_token
            add_special_tokens = not (bos and string.startswith(bos))
        return self._tokens.encode(string, add_special_tokens=add_special_tokens)

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        return "the artifact's own" if chat_template else None

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        return self._tokens.apply_chat_template(chat_history, add_generation_prompt=add_generation_prompt)

    def _loglikelihood_tokens(
        self, requests: Sequence[Pair], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        most = self.max_length + 1  # the last token is predicted, not read
        cut = []
        for _, context, continuation in requests:
            tokens = (context + continuation)[-most:]
            cut.append((tokens[: len(tokens) - len(continuation)], continuation))
        # Neighbours share prefixes, which are computed once.
        order = sorted(range(len(cut)), key=lambda index: cut[index])
        found: dict[int, tuple[float, bool]] = {}
        for index in tqdm(order, desc="score", disable=disable_tqdm):
            found[index] = self._scorer.score(*cut[index])
        return [found[index] for index in range(len(cut))]

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        windows: list[Pair] = []
        owners: list[int] = []
        for owner, request in enumerate(requests):
            cut = get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self._prefix,
                max_seq_len=self.max_length,
                context_len=1,
            )
            for context, continuation in map(make_disjoint_window, cut):
                windows.append((None, context, continuation))
                owners.append(owner)
        sums = [0.0] * len(requests)
        for owner, (score, _) in zip(owners, self._loglikelihood_tokens(windows, disable_tqdm), strict=True):
            sums[owner] += score
        return sums

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        prompts, params = [], []
        for request in requests:
            context, options = request.args
            one = self._sampling(options)
            most = self._llm.limit.tokens
            # Reserve what the task generates at most, like the harness's other models, but leave at least half for the
            # context.
            prompts.append(self.tok_encode(context)[-max(most - one.max_tokens, most // 2) :])
            params.append(one)
        with tqdm(total=len(prompts), desc="generate", disable=disable_tqdm) as bar:
            outputs = self._llm.generate(prompts, params, on_output=lambda _: bar.update())
        for output in outputs:
            if output.error is not None:
                raise RequestError(output.error.message)
        return [output.outputs[0].text for output in outputs]

    def _sampling(self, options: Mapping[str, Any]) -> SamplingParams:
        """A task's generation options. Raises RequestError for unsupported ones."""
        given = dict(normalize_gen_kwargs(dict(options), _MAX_GEN_TOKENS))
        stops = [text for text in given.pop("until") if text]
        most = given.pop("max_gen_toks")
        sampled = given.pop("do_sample")
        if unknown := sorted(set(given) - set(_SAMPLING)):
            raise RequestError(f"a task asks for {unknown[0]!r}, which llmc eval does not have; it has {_SAMPLING}")
        if not sampled:
            given = {key: value for key, value in given.items() if key == "repetition_penalty"} | {"temperature": 0.0}
        # Special tokens have no text in which to find a stop string.
        special = {text: self._tokens.special_token_id(text) for text in stops}
        return SamplingParams(
            max_tokens=most,
            stop=tuple(text for text in stops if special[text] is None),
            stop_token_ids=tuple(token for token in special.values() if token is not None),
            **given,
        )
