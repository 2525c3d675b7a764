"""Guided decoding: what a continuation must look like, and which tokens keep it so. Imports llguidance at first use."""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from .params import RequestError

if TYPE_CHECKING:
    from llguidance import LLMatcher

# Compiling takes time that grows with the square of the size: a second for this much.
MAX_SOURCE_BYTES = 128 << 10
MAX_NESTING = 100
# JSON allows space without end between its tokens, which small models never leave: one space, or a newline and its
# indentation.
_JSON_OPTIONS = {"whitespace_pattern": r"(\x20|\x0A\x20{0,32}|\x0A\x09{1,8})"}
_LENIENT_OPTIONS = {**_JSON_OPTIONS, "lenient": True, "coerce_one_of": True}
# Text compiled to find the place of an error; more would let a bad request keep a CPU busy.
_MAX_SEARCH_BYTES = 4 << 20


class GuideError(RuntimeError):
    """A guide that cannot go on in the middle of a text; the message is one sentence."""


@dataclass(frozen=True)
class Guided:
    """What a continuation must look like; make one with a class method. Each raises RequestError for what it refuses.

    kind: for messages. source: the grammar as llguidance reads it (JSON text, so that equal grammars are equal).
    parts: what a composed grammar consists of, by name, to say which part is at fault.
    """

    kind: str
    source: str
    parts: tuple[tuple[str, Guided], ...] = ()

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | str | bool, *, strict: bool = True) -> Guided:
        """JSON that the schema (an object, or its JSON text) accepts, properties in the schema's order.

        strict False ignores keywords that cannot be enforced; True refuses them.
        """
        what = "the JSON schema"
        text = schema_text(what, parse_json(what, schema) if isinstance(schema, str) else schema, strict=strict)
        return cls("json_schema", '{"grammars": [{"json_schema": ' + text + "}]}")

    @classmethod
    def json_object(cls) -> Guided:
        """Any JSON object."""
        return cls("json_object", cls.json_schema({"type": "object"}).source)

    @classmethod
    def regex(cls, pattern: str) -> Guided:
        """A full match of a regular expression, in Rust's syntax: no look-around, no back-references.

        Digits and word characters (the classes d and w) are those of ASCII, as in JSON Schema.
        """
        from llguidance import regex_to_lark

        text = regex_to_lark(_text("the regular expression", pattern), "dw")
        return cls("regex", _grammars(lark_grammar=f"start: /{text}/"))

    @classmethod
    def choice(cls, choices: Sequence[str]) -> Guided:
        """One of the texts."""
        if isinstance(choices, str) or not isinstance(choices, Sequence) or not choices:
            raise RequestError(f"the choices are {_shown(choices)}: give a list of texts, at least one")
        _check_size("the choice", len(choices))
        for text in choices:
            if not isinstance(text, str) or not text:
                raise RequestError(f"the choice {_shown(text)} is not a non-empty text: give texts only")
        _check_size("the choice", sum(map(len, choices)))
        return cls("choice", _grammars(lark_grammar="start: " + " | ".join(lark_text(text) for text in choices)))

    @classmethod
    def grammar(cls, text: str) -> Guided:
        """A context-free grammar: Lark as llguidance reads it, or GBNF (`root ::= …`)."""
        text = _text("the grammar", text)
        if "::=" in text:
            from llguidance.gbnf_to_lark import any_to_lark

            try:
                text = any_to_lark(text)
            except Exception as error:  # the converter raises bare Exception, and what its parser stumbles over
                raise RequestError(f"the grammar is not valid GBNF: {_one_line(str(error))}") from error
        return cls("grammar", _grammars(lark_grammar=text))

    @classmethod
    def lark(cls, kind: str, text: str, parts: Sequence[tuple[str, Guided]] = ()) -> Guided:
        """A grammar that was composed from others, which are named."""
        return cls(kind, _grammars(lark_grammar=text), tuple(parts))

    def __post_init__(self) -> None:
        what = f"the {self.kind.replace('_', ' ')}"
        try:
            _check_size(what, len(self.source.encode()))
        except UnicodeEncodeError as error:
            raise RequestError(f"{what} holds half a surrogate pair, which is no text: remove it") from error


def lark_text(text: str) -> str:
    """`text` as a literal of a Lark grammar."""
    return json.dumps(text, ensure_ascii=False)


def schema_text(what: str, schema: Mapping[str, Any] | bool, *, strict: bool) -> str:
    """JSON text of a schema with llmc's options, for `%json` in a Lark grammar. Raises RequestError, naming `what`."""
    if not isinstance(schema, (Mapping, bool)):
        raise RequestError(f"{what} is {_shown(schema)}: give an object")
    if schema is False:
        raise RequestError(f"{what} is false, which accepts nothing: give a schema that some value satisfies")
    _check_json(what, schema)
    fields = schema if isinstance(schema, Mapping) else {}
    return json.dumps({**fields, "x-guidance": _JSON_OPTIONS if strict else _LENIENT_OPTIONS}, ensure_ascii=False)


class TokenGuide:
    """The guide of one continuation: a pure function of the grammar and the tokens accepted so far."""

    def __init__(self, matcher: LLMatcher, num_words: int) -> None:
        self._matcher = matcher
        self._num_words = num_words

    @property
    def finished(self) -> bool:
        """The text is complete: no token but eos may follow."""
        return bool(self._matcher.is_stopped()) and not self._matcher.is_error()

    def mask(self) -> npt.NDArray[np.uint32]:
        """Words [at most ceil(vocab_size / 32)]: bit t % 32 of word t // 32 is set when token t may come next.

        Raises GuideError when the grammar's limits are exceeded.
        """
        words = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint32)[: self._num_words]
        self._check()
        return words

    def accept(self, token_id: int) -> None:
        """Moves past a token that was taken. Raises GuideError for one that the grammar does not allow."""
        # After the end only eos can come, as it does under ignore_eos.
        if not self.finished:
            self._matcher.consume_token(token_id)
            self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise GuideError(f"the grammar cannot go on: {_one_line(self._matcher.get_error())}")


class GuideCompiler:
    """Compiles grammars for one model and keeps the last `cache_entries` of them; may be used from any thread.

    tokenizer_json: text of tokenizer.json. vocab_size: of the model's logits; ids that the tokenizer lacks are never
    allowed. eos_token_ids: those that end a text for the engine. Raises RequestError when the model cannot be guided.
    """

    def __init__(
        self, tokenizer_json: str, vocab_size: int, eos_token_ids: Sequence[int], cache_entries: int = 128
    ) -> None:
        from llguidance import LLParserLimits, LLTokenizer

        if not eos_token_ids:
            raise RequestError("this model has no end-of-sequence token, which guided decoding needs to end a text")
        try:
            self._tokenizer = LLTokenizer(tokenizer_json, eos_token=list(eos_token_ids))
        except Exception as error:  # the library raises ValueError, and what its tokenizer reader does
            raise RequestError(f"guided decoding cannot use this model's tokenizer: {_one_line(str(error))}") from error
        # The limits count steps of work, not time, so that a grammar is taken or refused alike on every machine.
        self._limits = LLParserLimits(verbose_errors=False)
        self._num_words = -(-min(vocab_size, self._tokenizer.vocab_size) // 32)
        self._cache: OrderedDict[Guided, LLMatcher] = OrderedDict()
        self._cache_entries = cache_entries
        self._lock = threading.Lock()

    @classmethod
    def of_artifact(cls, path: Path, vocab_size: int) -> GuideCompiler:
        """For the artifact in directory `path`. Raises RequestError as the constructor does."""
        try:
            tokenizer = (path / "tokenizer.json").read_text(encoding="utf-8")
            eos = json.loads((path / "manifest.json").read_text(encoding="utf-8"))["model"]["eos_token_ids"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise RequestError(f"guided decoding needs the tokenizer and manifest of {path}: {error}") from error
        return cls(tokenizer, vocab_size, eos)

    def compile(self, guided: Guided) -> Callable[[], TokenGuide]:
        """A maker of guides, one a continuation. Raises RequestError, naming the place, for what is not valid."""
        with self._lock:
            matcher = self._cache.get(guided)
            if matcher is not None:
                self._cache.move_to_end(guided)
        if matcher is None:
            matcher = self._matcher(guided.source)
            if matcher.is_error():
                raise RequestError(self._explain(guided, matcher.get_error()))
            with self._lock:
                self._cache[guided] = matcher
                while len(self._cache) > self._cache_entries:
                    self._cache.popitem(last=False)
        pristine = matcher
        # A copy shares nothing, so neither results nor limits depend on what else runs.
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
            why = "the options of oneOf may overlap, use anyOf" if "coerce_one_of" in message else _one_line(message)
            return f"the JSON schema is not supported at {self._place(schema, message)}: {why}"
        place = re.match(r"at (\d+)\((\d+)\): ([^\n]*)", message)
        if place:
            line, column, text = place.groups()
            return f"the {guided.kind} is not valid in line {line}, column {column}: {_one_line(text)}"
        return f"the {guided.kind} is not valid: {_one_line(message)}"

    def _place(self, schema: Mapping[str, Any], message: str) -> str:
        """JSON pointer of the innermost part of a schema that alone fails with the same message."""
        shared = {key: schema[key] for key in ("$defs", "definitions", "x-guidance") if key in schema}
        budget = _MAX_SEARCH_BYTES

        def fails(child: Any) -> bool:
            nonlocal budget
            if budget < 0 or not isinstance(child, Mapping):
                return False
            source = _grammars(json_schema={**child, **shared})
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
    """The parts of a schema that are schemas themselves, with their places."""
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


def _grammars(**grammar: Any) -> str:
    return json.dumps({"grammars": [grammar]}, ensure_ascii=False)


def _regex_error(message: str) -> str:
    error = re.search(r"^error: (.*)$", message, re.MULTILINE)
    return _one_line(error[1] if error else message)


def _check_size(what: str, size: int) -> None:
    """Before anything that large is copied or read: `size` may be of a part."""
    if size > MAX_SOURCE_BYTES:
        raise RequestError(f"{what} has {size} bytes or more, at most {MAX_SOURCE_BYTES} are taken: simplify it")


def parse_json(what: str, text: str) -> Any:
    """The value of JSON text. Raises RequestError, naming `what`, for text that is too large or no JSON."""
    _check_size(what, len(text))
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{what} is not valid JSON: {_one_line(str(error))}") from error


def _text(what: str, text: Any) -> str:
    if not isinstance(text, str) or not text.strip():
        raise RequestError(f"{what} is {_shown(text)}: give a text that is not empty")
    _check_size(what, len(text))
    return text


def _check_json(what: str, value: Any) -> None:
    """Raises RequestError for what is too large, nested too deeply or no JSON; without recursion, which it protects."""
    level, size = [value], 0
    for _ in range(MAX_NESTING):
        below: list[Any] = []
        for item in level:
            # At least so many characters: one a value, and those of texts.
            size += len(item) if isinstance(item, (Mapping, list, tuple, str)) else 1
            _check_size(what, size)
            if isinstance(item, Mapping):
                below += item.values()
                size += sum(len(key) for key in item if isinstance(key, str))
                bad = next((key for key in item if not isinstance(key, str)), None)
                if bad is not None:
                    raise RequestError(f"{what} has the key {_shown(bad)}, which is no text: use JSON types")
            elif isinstance(item, (list, tuple)):
                below += item
            elif isinstance(item, int) and not -(1 << 63) <= item < 1 << 64:
                raise RequestError(f"{what} has the number {_shown(item)}: use one of at most 64 bits")
            elif item is not None and not isinstance(item, (str, bool, int, float)):
                raise RequestError(f"{what} holds a {type(item).__name__}: use JSON types")
        level = below
        if not level:
            return
    raise RequestError(f"{what} is nested more than {MAX_NESTING} levels deep: flatten it, or use $defs")


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}…"


def _one_line(text: str) -> str:
    return " ".join(text.split())[:300]
