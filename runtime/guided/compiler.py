"""Compiles constraints for a model, and computes the tokens that keep a text valid. Imports llguidance on first use."""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from llmc.manifest import ManifestError, read_listed, read_manifest
from llmc.runtime.guided.constraint import Guided, grammars, one_line
from llmc.runtime.request_error import RequestError

if TYPE_CHECKING:
    from llguidance import LLMatcher

# Text compiled to locate an error; more would let a bad request occupy a CPU.
_MAX_SEARCH_BYTES = 4 << 20


class GuideError(RuntimeError):
    """A guide cannot continue within a text; the message is one sentence."""


class TokenGuide:
    """The guide of one continuation: a pure function of the grammar and the accepted tokens."""

    def __init__(self, matcher: LLMatcher, num_words: int) -> None:
        self._matcher = matcher
        self._num_words = num_words

    @property
    def finished(self) -> bool:
        """Whether the text is complete: only eos may follow."""
        return bool(self._matcher.is_stopped()) and not self._matcher.is_error()

    def mask(self) -> npt.NDArray[np.uint32]:
        """Words [at most ceil(vocab_size / 32)]: bit t % 32 of word t // 32 is set if token t may come next.

        Raises GuideError if the grammar's limits are exceeded.
        """
        words = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint32)[: self._num_words]
        self._check()
        return words

    def accept(self, token_id: int) -> None:
        """Accepts a token that was taken. Raises GuideError for one that the grammar forbids."""
        # After the end only eos can come, as under ignore_eos.
        if not self.finished:
            self._matcher.consume_token(token_id)
            self._check()

    def forced(self) -> list[int]:
        """Next tokens wherever the grammar leaves only one text, in the tokenizer's segmentation; often none."""
        # On a copy: a guide's consumed limits must depend on the text alone.
        return [int(token) for token in self._matcher.deep_copy().compute_ff_tokens()]

    def copy(self) -> TokenGuide:
        """An independent guide with the same text so far."""
        return TokenGuide(self._matcher.deep_copy(), self._num_words)

    def _check(self) -> None:
        if self._matcher.is_error():
            raise GuideError(f"the grammar cannot go on: {one_line(self._matcher.get_error())}")


class GuideCompiler:
    """Compiles grammars for one model, and caches the last `cache_entries`; thread-safe.

    tokenizer_json: text of tokenizer.json. vocab_size: of the model's logits; ids that the tokenizer lacks are never
    allowed. eos_token_ids: the engine's. Raises RequestError if the model cannot be guided.
    """

    def __init__(
        self, tokenizer_json: str, vocab_size: int, eos_token_ids: Sequence[int], cache_entries: int = 128
    ) -> None:
        from llguidance import LLParserLimits, LLTokenizer

        if not eos_token_ids:
            raise RequestError("this model has no end-of-sequence token, which guided decoding needs to end a text")
        try:
            self._tokenizer = LLTokenizer(tokenizer_json, eos_token=list(eos_token_ids))
        except Exception as error:  # the library raises ValueError, and its tokenizer reader others
            raise RequestError(f"guided decoding cannot use this model's tokenizer: {one_line(str(error))}") from error
        # The limits count work, not time, so that machines agree on accepting a grammar.
        self._limits = LLParserLimits(verbose_errors=False)
        self._num_words = -(-min(vocab_size, self._tokenizer.vocab_size) // 32)
        self._cache: OrderedDict[Guided, LLMatcher] = OrderedDict()
        self._cache_entries = cache_entries
        self._lock = threading.Lock()

    @classmethod
    def of_artifact(cls, path: Path, vocab_size: int) -> GuideCompiler:
        """For the artifact in directory `path`. Raises RequestError as the constructor does."""
        try:
            tokenizer = read_listed(path, "tokenizer.json")
            model = read_manifest(path).get("model")
            if tokenizer is None or model is None:
                raise ManifestError("compile from a model that has a tokenizer")
            return cls(tokenizer.decode(), vocab_size, model["eos_token_ids"])
        except (ManifestError, UnicodeDecodeError) as error:
            raise RequestError(f"guided decoding needs the tokenizer and manifest of {path}: {error}") from error

    def compile(self, guided: Guided) -> Callable[[], TokenGuide]:
        """Returns a factory of guides, one per continuation. Raises RequestError, naming the location, for an invalid
        grammar."""
        with self._lock:
            matcher = self._cache.get(guided)
            if matcher is not None:
                self._cache.move_to_end(guided)
        if matcher is None:
            matcher = self._matcher(guided.source)
            if matcher.is_error():
                raise RequestError(self._explain(guided, matcher.get_error()))
            # All guides start from this copy, so its initial work is shared, and excessive grammars fail early.
            matcher.compute_bitmask()
            if matcher.is_error():
                why = one_line(matcher.get_error().removesuffix("<non-verbose/>"))
                raise RequestError(f"the {guided.kind.replace('_', ' ')} is too complex: {why}; simplify it")
            with self._lock:
                self._cache[guided] = matcher
                while len(self._cache) > self._cache_entries:
                    self._cache.popitem(last=False)
        pristine = matcher
        # A copy shares nothing, so results and limits do not depend on other requests.
        return lambda: TokenGuide(pristine.deep_copy(), self._num_words)

    @property
    def num_cached(self) -> int:
        return len(self._cache)

    def _matcher(self, source: str) -> LLMatcher:
        from llguidance import LLMatcher

        return LLMatcher(self._tokenizer, source, log_level=0, limits=self._limits)

    def _explain(self, guided: Guided, message: str) -> str:
        for name, part in guided.parts:
            alone = self._matcher(part.source)
            if alone.is_error():
                return f"{name}: {self._explain(part, alone.get_error())}"
        if guided.kind == "regex":
            return f"the regular expression is not valid: {_regex_error(message)}"
        if guided.kind == "json_schema":
            schema = json.loads(guided.source)["grammars"][0]["json_schema"]
            why = "the options of oneOf may overlap, use anyOf" if "coerce_one_of" in message else one_line(message)
            return f"the JSON schema is not supported at {self._place(schema, message)}: {why}"
        place = re.match(r"at (\d+)\((\d+)\): ([^\n]*)", message)
        if place:
            line, column, text = place.groups()
            return f"the {guided.kind} is not valid in line {line}, column {column}: {one_line(text)}"
        return f"the {guided.kind} is not valid: {one_line(message)}"

    def _place(self, schema: Mapping[str, Any], message: str) -> str:
        """JSON pointer of the innermost part of a schema that alone fails with the same message."""
        shared = {key: schema[key] for key in ("$defs", "definitions", "x-guidance") if key in schema}
        budget = _MAX_SEARCH_BYTES

        def fails(child: Any) -> bool:
            nonlocal budget
            if budget < 0 or not isinstance(child, Mapping):
                return False
            source = grammars(json_schema={**child, **shared})
            budget -= len(source)
            alone = self._matcher(source)
            return bool(alone.is_error()) and alone.get_error() == message

        place, part = "#", schema
        while True:
            inner = next(((path, child) for path, child in _children(part) if fails(child)), None)
            if inner is None:
                return place
            place, part = place + inner[0], inner[1]


def _children(schema: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """(location, sub-schema) of the parts of a schema that are schemas."""
    parts: list[tuple[str, Any]] = []
    for key in ("$defs", "definitions", "properties", "patternProperties"):
        if isinstance(schema.get(key), Mapping):
            parts += [(f"/{key}/{_pointer(str(name))}", child) for name, child in schema[key].items()]
    for key in ("anyOf", "oneOf", "allOf", "prefixItems"):
        if isinstance(schema.get(key), list):
            parts += [(f"/{key}/{index}", child) for index, child in enumerate(schema[key])]
    parts += [(f"/{key}", schema[key]) for key in ("items", "additionalProperties") if key in schema]
    return parts


def _pointer(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


def _regex_error(message: str) -> str:
    error = re.search(r"^error: (.*)$", message, re.MULTILINE)
    return one_line(error[1] if error else message)
