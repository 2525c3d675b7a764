"""Guided decoding: constraints on continuations. Imports llguidance on first use."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llmc.runtime.guided.schema_defaults import SchemaDefaults
from llmc.runtime.request_error import RequestError

# Compile time grows quadratically with size: one second at this size.
MAX_SOURCE_BYTES = 128 << 10
MAX_NESTING = 100
# The time of one mask grows with the text so far and the number of rules: a few milliseconds.
MAX_TEXT_BYTES = 8 << 10
MAX_GRAMMAR_BYTES = 32 << 10
# JSON allows unlimited white space between tokens, in which small models get stuck: allow one space, or a newline and
# its indentation.
_JSON_OPTIONS = {"whitespace_pattern": r"(\x20|\x0A\x20{0,32}|\x0A\x09{1,8})"}
_LENIENT_OPTIONS = {**_JSON_OPTIONS, "lenient": True, "coerce_one_of": True}
_JSON_SCHEMA = SchemaDefaults()
# Schema annotations, which do not constrain output.
_ANNOTATIONS = frozenset({"title", "description", "$comment", "default"})


@dataclass(frozen=True)
class Guided:
    """A constraint on a continuation; create it with a class method. Each raises RequestError for invalid input.

    kind: for messages. source: the grammar for llguidance, as JSON text, so that equal grammars compare equal. parts:
    named parts of a composed grammar, so that errors can name the faulty one.
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
        """JSON that matches the schema (an object, or its JSON text), with properties in the schema's order.

        strict: refuse keywords that cannot be enforced, instead of ignoring them. defaults: for what the schema leaves
        open.
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

        The classes \\d and \\w are ASCII, as in JSON Schema.
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
        # One terminal: as rules, each choice would be a parse of its own.
        texts = " | ".join(lark_text(text) for text in choices)
        return cls("choice", grammars(lark_grammar=f"start: CHOICE\nCHOICE: {texts}"))

    @classmethod
    def grammar(cls, text: str) -> Guided:
        """A context-free grammar: Lark in llguidance's dialect, or GBNF (`root ::= …`)."""
        text = _text("the grammar", text, MAX_GRAMMAR_BYTES)
        if "::=" in text:
            from llguidance.gbnf_to_lark import any_to_lark

            try:
                text = any_to_lark(text)
            except Exception as error:  # the converter raises bare Exception, and its parser others
                raise RequestError(f"the grammar is not valid GBNF: {one_line(str(error))}") from error
        return cls("grammar", grammars(lark_grammar=text))

    @classmethod
    def lark(cls, kind: str, text: str, parts: Sequence[tuple[str, Guided]] = ()) -> Guided:
        """A grammar composed from other, named ones."""
        return cls(kind, grammars(lark_grammar=text), tuple(parts))

    def __post_init__(self) -> None:
        what = f"the {self.kind.replace('_', ' ')}"
        try:
            check_size(what, len(self.source.encode()))
        except UnicodeEncodeError as error:
            raise RequestError(f"{what} holds half a surrogate pair, which is not text: remove it") from error


def lark_text(text: str) -> str:
    """`text` as a literal in a Lark grammar."""
    return json.dumps(text, ensure_ascii=False)


def schema_text(
    what: str, schema: Mapping[str, Any] | bool, *, strict: bool, defaults: SchemaDefaults = _JSON_SCHEMA
) -> str:
    """The JSON text of a schema with llmc's options, for `%json` in a Lark grammar. Raises RequestError naming
    `what`."""
    if not isinstance(schema, (Mapping, bool)):
        raise RequestError(f"{what} is {_shown(schema)}: give an object")
    if schema is False:
        raise RequestError(f"{what} is false, which accepts nothing: give a schema that some value satisfies")
    _check_json(what, schema)
    said = defaults.apply(schema)
    fields = said if isinstance(said, Mapping) else {}
    return json.dumps({**fields, "x-guidance": _JSON_OPTIONS if strict else _LENIENT_OPTIONS}, ensure_ascii=False)


def grammars(**grammar: Any) -> str:
    """A grammar in llguidance's JSON form."""
    return json.dumps({"grammars": [grammar]}, ensure_ascii=False)


def check_size(what: str, size: int, most: int = MAX_SOURCE_BYTES) -> None:
    """Checks a size before copying or reading; `size` may be that of a part. Raises RequestError."""
    if size > most:
        raise RequestError(f"{what} has {size} bytes or more, at most {most} are taken: simplify it")


def parse_json(what: str, text: str) -> Any:
    """Parses JSON text. Raises RequestError naming `what` if it is too large or invalid."""
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
    """Raises RequestError for a value that is too large, too deeply nested or not JSON; iterative, to protect recursive
    code."""
    level, size = [(value, False)], 0
    for _ in range(MAX_NESTING):
        below: list[tuple[Any, bool]] = []
        for item, literal in level:
            # A lower bound of its characters: one per value, plus text lengths.
            size += len(item) if isinstance(item, (Mapping, list, tuple, str)) else 1
            check_size(what, size)
            if isinstance(item, Mapping):
                for key, child in item.items():
                    if not isinstance(key, str):
                        raise RequestError(f"{what} has the key {_shown(key)}, which is not text: use JSON types")
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
    """A library's message as part of a sentence."""
    return " ".join(text.split())[:300]
