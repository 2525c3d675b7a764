"""Guided decoding: what a continuation must look like. Imports llguidance at first use."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llmc.runtime.guided.schema_defaults import SchemaDefaults
from llmc.runtime.request_error import RequestError

# Compiling takes time that grows with the square of the size: a second for this much.
MAX_SOURCE_BYTES = 128 << 10
MAX_NESTING = 100
# What one mask takes grows with the text that is being written, and with the rules of a grammar: some milliseconds.
MAX_TEXT_BYTES = 8 << 10
MAX_GRAMMAR_BYTES = 32 << 10
# JSON allows space without end between its tokens, which small models never leave: one space, or a newline and its
# indentation.
_JSON_OPTIONS = {"whitespace_pattern": r"(\x20|\x0A\x20{0,32}|\x0A\x09{1,8})"}
_LENIENT_OPTIONS = {**_JSON_OPTIONS, "lenient": True, "coerce_one_of": True}
_JSON_SCHEMA = SchemaDefaults()
# Texts that no output is compared with.
_ANNOTATIONS = frozenset({"title", "description", "$comment", "default"})


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
    def json_schema(
        cls,
        schema: Mapping[str, Any] | str | bool,
        *,
        strict: bool = True,
        defaults: SchemaDefaults = _JSON_SCHEMA,
    ) -> Guided:
        """JSON that the schema (an object, or its JSON text) accepts, properties in the schema's order.

        strict False ignores keywords that cannot be enforced; True refuses them. defaults: what it means where it says
        nothing.
        """
        what = "the JSON schema"
        given = parse_json(what, schema) if isinstance(schema, str) else schema
        text = schema_text(what, given, strict=strict, defaults=defaults)
        return cls("json_schema", '{"grammars": [{"json_schema": ' + text + "}]}")

    @classmethod
    def json_object(cls, defaults: SchemaDefaults = _JSON_SCHEMA) -> Guided:
        """Any JSON object."""
        return cls("json_object", cls.json_schema({"type": "object"}, defaults=defaults).source)

    @classmethod
    def regex(cls, pattern: str) -> Guided:
        """A full match of a regular expression, in Rust's syntax: no look-around, no back-references.

        Digits and word characters (the classes d and w) are those of ASCII, as in JSON Schema.
        """
        from llguidance import regex_to_lark

        text = regex_to_lark(_text("the regular expression", pattern, MAX_TEXT_BYTES), "dw")
        return cls("regex", grammars(lark_grammar=f"start: /{text}/"))

    @classmethod
    def choice(cls, choices: Sequence[str]) -> Guided:
        """One of the texts."""
        if isinstance(choices, str) or not isinstance(choices, Sequence) or not choices:
            raise RequestError(f"the choices are {_shown(choices)}: give a list of texts, at least one")
        check_size("the choice", len(choices))
        for text in choices:
            if not isinstance(text, str) or not text:
                raise RequestError(f"the choice {_shown(text)} is not a non-empty text: give texts only")
            check_size("a text of the choice", len(text), MAX_TEXT_BYTES)
        check_size("the choice", sum(map(len, choices)))
        # One terminal: as a rule, each choice would be a parse of its own.
        texts = " | ".join(lark_text(text) for text in choices)
        return cls("choice", grammars(lark_grammar=f"start: CHOICE\nCHOICE: {texts}"))

    @classmethod
    def grammar(cls, text: str) -> Guided:
        """A context-free grammar: Lark as llguidance reads it, or GBNF (`root ::= …`)."""
        text = _text("the grammar", text, MAX_GRAMMAR_BYTES)
        if "::=" in text:
            from llguidance.gbnf_to_lark import any_to_lark

            try:
                text = any_to_lark(text)
            except Exception as error:  # the converter raises bare Exception, and what its parser stumbles over
                raise RequestError(f"the grammar is not valid GBNF: {one_line(str(error))}") from error
        return cls("grammar", grammars(lark_grammar=text))

    @classmethod
    def lark(cls, kind: str, text: str, parts: Sequence[tuple[str, Guided]] = ()) -> Guided:
        """A grammar that was composed from others, which are named."""
        return cls(kind, grammars(lark_grammar=text), tuple(parts))

    def __post_init__(self) -> None:
        what = f"the {self.kind.replace('_', ' ')}"
        try:
            check_size(what, len(self.source.encode()))
        except UnicodeEncodeError as error:
            raise RequestError(f"{what} holds half a surrogate pair, which is no text: remove it") from error


def lark_text(text: str) -> str:
    """`text` as a literal of a Lark grammar."""
    return json.dumps(text, ensure_ascii=False)


def schema_text(
    what: str, schema: Mapping[str, Any] | bool, *, strict: bool, defaults: SchemaDefaults = _JSON_SCHEMA
) -> str:
    """JSON text of a schema with llmc's options, for `%json` in a Lark grammar. Raises RequestError, naming `what`."""
    if not isinstance(schema, (Mapping, bool)):
        raise RequestError(f"{what} is {_shown(schema)}: give an object")
    if schema is False:
        raise RequestError(f"{what} is false, which accepts nothing: give a schema that some value satisfies")
    _check_json(what, schema)
    said = defaults.apply(schema)
    fields = said if isinstance(said, Mapping) else {}
    return json.dumps({**fields, "x-guidance": _JSON_OPTIONS if strict else _LENIENT_OPTIONS}, ensure_ascii=False)


def grammars(**grammar: Any) -> str:
    """A grammar as llguidance reads it."""
    return json.dumps({"grammars": [grammar]}, ensure_ascii=False)


def check_size(what: str, size: int, most: int = MAX_SOURCE_BYTES) -> None:
    """Before anything that large is copied or read: `size` may be of a part. Raises RequestError."""
    if size > most:
        raise RequestError(f"{what} has {size} bytes or more, at most {most} are taken: simplify it")


def parse_json(what: str, text: str) -> Any:
    """The value of JSON text. Raises RequestError, naming `what`, for text that is too large or no JSON."""
    check_size(what, len(text))
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{what} is not valid JSON: {one_line(str(error))}") from error


def _text(what: str, text: Any, most: int) -> str:
    if not isinstance(text, str) or not text.strip():
        raise RequestError(f"{what} is {_shown(text)}: give a text that is not empty")
    check_size(what, len(text), most)
    return text


def _check_json(what: str, value: Any) -> None:
    """Raises RequestError for what is too large, nested too deeply or no JSON; without recursion, which it protects."""
    level, size = [(value, False)], 0
    for _ in range(MAX_NESTING):
        below: list[tuple[Any, bool]] = []
        for item, literal in level:
            # At least so many characters: one a value, and those of texts.
            size += len(item) if isinstance(item, (Mapping, list, tuple, str)) else 1
            check_size(what, size)
            if isinstance(item, Mapping):
                for key, child in item.items():
                    if not isinstance(key, str):
                        raise RequestError(f"{what} has the key {_shown(key)}, which is no text: use JSON types")
                    size += len(key)
                    check_size(f"a name in {what}", len(key), MAX_TEXT_BYTES)
                    if isinstance(child, str) and key in _ANNOTATIONS and not literal:
                        size += len(child)
                    else:
                        below.append((child, literal or key in ("const", "enum")))
            elif isinstance(item, (list, tuple)):
                below += [(child, literal) for child in item]
            elif isinstance(item, str):
                check_size(f"a text in {what}", len(item), MAX_TEXT_BYTES)
            elif isinstance(item, int) and not -(1 << 63) <= item < 1 << 64:
                raise RequestError(f"{what} has the number {_shown(item)}: use one of at most 64 bits")
            elif item is not None and not isinstance(item, (bool, int, float)):
                raise RequestError(f"{what} holds a {type(item).__name__}: use JSON types")
        level = below
        if not level:
            return
    raise RequestError(f"{what} is nested more than {MAX_NESTING} levels deep: flatten it, or use $defs")


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}…"


def one_line(text: str) -> str:
    """A library's message as a part of a sentence."""
    return " ".join(text.split())[:300]
