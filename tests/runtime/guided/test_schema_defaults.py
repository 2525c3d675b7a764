"""What a schema means where it says nothing: closed objects and bounded strings; by brute force, what is accepted."""

from __future__ import annotations

import copy
import itertools
import json
from typing import Any

import jsonschema_rs
import pytest

from llmc.runtime.guided.compiler import GuideCompiler, GuideError
from llmc.runtime.guided.constraint import Guided
from llmc.runtime.guided.schema_defaults import SchemaDefaults
from llmc.runtime.request_error import RequestError

from support.paths import ROOT

EOS = 1
COMPILER = GuideCompiler((ROOT / "examples/tiny-english/tokenizer.json").read_text(encoding="utf-8"), 2048, [EOS])
FORBID, BOUND = SchemaDefaults(additional_properties=False), SchemaDefaults(max_string=3)
BOTH = SchemaDefaults(additional_properties=False, max_string=3)


def accepts(schema: Any, value: Any, defaults: SchemaDefaults) -> bool:
    """Whether a constrained answer could be this value."""
    guide = COMPILER.compile(Guided.json_schema(schema, defaults=defaults))()
    try:
        for token in COMPILER._tokenizer.tokenize_str(json.dumps(value, ensure_ascii=False)):
            guide.mask()
            guide.accept(token)
        return bool(guide.mask()[0] >> EOS & 1)
    except GuideError:
        return False


# As clients send them: pydantic's, zod's, and OpenAI's examples.
ADDRESS = {"type": "object", "properties": {"zip": {"type": "integer"}}, "required": ["zip"]}
REAL: dict[str, dict[str, Any]] = {
    "flat": ADDRESS,
    "pydantic": {
        "$defs": {"Address": {"title": "Address", **ADDRESS}},
        "title": "Person",
        "type": "object",
        "properties": {
            "name": {"title": "Name", "type": "string"},
            "home": {"$ref": "#/$defs/Address"},
            "nick": {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None},
        },
        "required": ["name", "home"],
    },
    "inherited": {"allOf": [ADDRESS, {"type": "object", "properties": {"a": {"type": "integer"}}}]},
    "inherited by reference": {
        "$defs": {"base": ADDRESS},
        "type": "object",
        "allOf": [{"$ref": "#/$defs/base"}],
        "properties": {"a": {"type": "integer"}},
        "required": ["a"],
    },
    "alternatives": {"anyOf": [ADDRESS, {"type": "object", "properties": {"a": {"type": "integer"}}}]},
    "open by itself": {**ADDRESS, "additionalProperties": {"type": "integer"}},
    "requires more": {**ADDRESS, "required": ["zip", "a"]},
    "a map": {"type": "object"},
    "a list": {"type": "array", "items": ADDRESS},
}
ZIP, MORE = {"zip": 1}, {"zip": 1, "a": 2}
PERSON = {"name": "x", "home": ZIP}


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("flat", ZIP, True),
        ("flat", MORE, False),
        ("pydantic", PERSON, True),
        ("pydantic", {**PERSON, "nick": None}, True),
        ("pydantic", {"name": "x", "home": MORE}, False),
        ("pydantic", {**PERSON, "a": 1}, False),
        ("inherited", MORE, True),
        ("inherited by reference", MORE, True),
        ("alternatives", ZIP, True),
        ("alternatives", {"a": 2}, True),
        ("alternatives", {"b": 2}, False),
        ("open by itself", MORE, True),
        ("requires more", MORE, True),
        ("a map", {"b": 1}, True),
        ("a list", [ZIP], True),
        ("a list", [MORE], False),
    ],
)
def test_properties_that_are_not_listed(name: str, value: Any, allowed: bool) -> None:
    schema = copy.deepcopy(REAL[name])
    assert accepts(schema, value, FORBID) == allowed
    assert accepts(schema, value, SchemaDefaults()), "JSON Schema's own default allows them"
    assert schema == REAL[name], "the schema that was given is left alone"


@pytest.mark.parametrize(
    ("schema", "value", "allowed"),
    [
        ({"type": "string"}, "abc", True),
        ({"type": "string"}, "abcd", False),
        ({"type": ["string", "null"]}, "abcd", False),
        ({"type": ["string", "null"]}, None, True),
        ({"type": "string", "maxLength": 5}, "abcde", True),
        ({"type": "string", "minLength": 5}, "abcde", True),
        ({"type": "string", "minLength": 5}, "abcdef", False),
        ({"type": "string", "format": "date"}, "2024-02-29", True),
        ({"type": "string", "pattern": "^a+$"}, "aaaaa", True),
        ({"enum": ["abcdef"]}, "abcdef", True),
        ({"const": {"a": "abcdef"}}, {"a": "abcdef"}, True),
        ({"type": "object", "properties": {"a": {"type": "string"}}}, {"a": "abcd"}, False),
        ({"type": "object", "properties": {"a": {}}}, {"a": "abcd"}, False),
        ({"type": "object", "properties": {"a": True}}, {"a": ["abc", {"b": "abc"}]}, True),
        ({"type": "object", "properties": {"a": {}}}, {"b": "abcd"}, False),
        ({"type": "object", "properties": {"a": {}}}, {"b": [1, "abc"]}, True),
        ({"type": "object"}, {"b": "abcd"}, False),
        ({"type": "object"}, {"b": {"c": "abcd"}}, False),
        ({"type": "array"}, ["abcd"], False),
        ({"type": "array"}, ["abc", 12345], True),
        ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, "abcd", False),
        ({"$defs": {"s": {"type": "string"}}, "$ref": "#/$defs/s"}, "abcd", False),
        ({"allOf": [{"type": "string"}, {"minLength": 2}]}, "abc", True),
    ],
)
def test_strings_without_a_bound(schema: Any, value: Any, allowed: bool) -> None:
    assert accepts(schema, value, BOUND) == allowed
    assert accepts(schema, value, SchemaDefaults()) or not jsonschema_rs.is_valid(schema, value)


INNER: list[dict[str, Any] | bool] = [{"type": "string"}, {}, True, {"type": "array"}]
REST: list[dict[str, Any]] = [
    {},
    {"required": ["a"]},
    {"additionalProperties": True},
    {"additionalProperties": {"type": "integer"}},
]
SMALL: list[dict[str, Any]] = [
    *({"type": "object", "properties": {"a": inner}, **more} for inner in INNER for more in REST),
    {"type": "object"},
    {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]},
    {"type": "array", "items": {"type": "object", "properties": {"a": {"type": "string"}}}},
]
_LEAVES = [1, None, "", "abc", "abcd"]
VALUES = [
    *_LEAVES,
    *([leaf] for leaf in _LEAVES),
    *({key: leaf} for key in ("a", "b") for leaf in (*_LEAVES, ["abc"], ["abcd"])),
    *([{"a": leaf}] for leaf in _LEAVES),
    *({"a": first, "b": second} for first, second in itertools.product(("abc", "abcd"), (1, "abc", "abcd"))),
]


@pytest.mark.parametrize("schema", SMALL, ids=json.dumps)
def test_what_is_accepted_by_brute_force(schema: dict[str, Any]) -> None:
    """With defaults, a value is accepted exactly if the schema that says them accepts it, and so does the plain one."""
    said = BOTH.apply(schema)
    assert isinstance(said, dict)
    plain, filled = jsonschema_rs.validator_for(schema), jsonschema_rs.validator_for(said)
    narrowed = 0
    for value in VALUES:
        accepted = accepts(schema, value, BOTH)
        assert accepted == filled.is_valid(value), value
        assert not accepted or plain.is_valid(value), value
        narrowed += accepted != plain.is_valid(value)
    assert narrowed


def test_json_object_of_bounded_strings() -> None:
    assert Guided.json_object(BOUND).source == Guided.json_schema({"type": "object"}, defaults=BOUND).source


@pytest.mark.parametrize("limit", [-1, True, 1 << 17, "3"])
def test_bounds_that_are_refused(limit: Any) -> None:
    with pytest.raises(RequestError, match="give a whole number"):
        SchemaDefaults(max_string=limit)


def test_defaults_that_say_nothing_change_nothing() -> None:
    for schema in REAL.values():
        assert SchemaDefaults().apply(schema) is schema
