"""Constrained calls of Gemma 4: what the grammar of a schema writes, the parser reads, and the schema accepts."""

from __future__ import annotations

import json
from typing import Any

import jsonschema_rs
import pytest

from llmc.runtime.guided.compiler import GuideCompiler
from llmc.runtime.guided.constraint import Guided
from llmc.runtime.guided.schema_defaults import SchemaDefaults
from llmc.runtime.request_error import RequestError
from llmc.runtime.server.tools.definitions import read_tools
from llmc.runtime.server.tools.gemma4 import Gemma4Parser
from llmc.runtime.text.tokenizer import Tokenizer

from support.gemma4_chat import IDS, with_markers
from support.guides import COMPILER, EOS, NUM_TOKENS, PERSON, random_text
from support.told_answers import message, special_tokenizer


def function(parameters: Any, name: str = "f", **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters, **fields}}


SPECIAL = GuideCompiler(with_markers(), NUM_TOKENS + 100, [EOS])
_END = [SPECIAL._tokenizer.tokenize_str(text)[0] for text in ("}", "]", ",", ":", "0")]
ENDING = [IDS['<|"|>'], *_END, IDS["<tool_call|>"]]


@pytest.fixture(scope="module")
def special(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("special")
    (folder / "tokenizer.json").write_text(with_markers())
    return Tokenizer(folder)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return special_tokenizer(tmp_path_factory.mktemp("plain"), [])


def constraint(
    tools: list[dict[str, Any]], tokenizer: Tokenizer, *, start: str = "calls", parallel: bool = False, **options: Any
) -> Guided:
    use = read_tools(tools, "required", parallel, **options)
    assert use is not None
    parts = [tool.guided() for tool in use.tools]
    return Guided.lark("tools", f"start: {start}\n{Gemma4Parser.grammar(use.tools, use.parallel, tokenizer)}", parts)


TREE = {
    "type": "object",
    "properties": {"tree": {"$ref": "#/$defs/node"}},
    "required": ["tree"],
    "$defs": {
        "node": {
            "type": "object",
            "properties": {"leaf": {"type": "boolean"}, "sub": {"type": "array", "items": {"$ref": "#/$defs/node"}}},
            "required": ["leaf"],
            "additionalProperties": False,
        }
    },
}
MIXED = {
    "type": "object",
    "properties": {
        "b:c": {"type": ["integer", "null"], "minimum": -3, "maximum": 9},
        "A key": {"anyOf": [{"type": "string", "minLength": 2, "maxLength": 5}, {"type": "boolean"}]},
        "list": {
            "type": "array",
            "minItems": 1,
            "maxItems": 3,
            "items": {"type": "number", "minimum": 0, "maximum": 1},
        },
        "pairs": {"type": "object", "additionalProperties": {"type": "integer", "minimum": 0, "maximum": 99}},
        "fixed": {"enum": ["x", "", 3, None, True, ["y", {"z": "{"}]]},
        "both": {"allOf": [{"type": "string"}, {"maxLength": 3}, {"pattern": "^[a-c]+$"}]},
        "never": False,
    },
    "required": ["list", "fixed"],
}
OPEN_ENDED = {"type": "object", "properties": {"any": {}, "empty": {"type": "object", "additionalProperties": False}}}
SCHEMAS: dict[str, dict[str, Any]] = {
    "person": PERSON,
    "tree": TREE,
    "mixed": MIXED,
    "open": OPEN_ENDED,
    "free": {"type": "object"},
}


@pytest.mark.parametrize("name", sorted(SCHEMAS))
@pytest.mark.parametrize("parallel", [True, False])
def test_what_is_written_is_read_and_fits_the_schema(name: str, parallel: bool, special: Tokenizer) -> None:
    tools = [function(SCHEMAS[name]), function(None, "other")]
    make = SPECIAL.compile(constraint(tools, special, parallel=parallel))
    validator = jsonschema_rs.validator_for(SCHEMAS[name])
    for seed in range(12):
        text = random_text(make(), seed, num_free=40, compiler=SPECIAL, ending=ENDING)
        parser = Gemma4Parser({"f", "other"})
        content, calls = message(parser.push(text) + parser.finish())
        assert content == "", text
        assert len(calls) == 1 or parallel
        for called, arguments in calls:
            if called == "f":
                # The text may have numbers that floats do not reach.
                validator.validate(json.loads(arguments, parse_float=lambda digits: min(float(digits), 1e300)))
            else:
                assert arguments == "{}"


CALL = "<|tool_call>call:"
PLACE = {
    "type": "object",
    "properties": {"zip": {"type": "string", "pattern": "^[0-9]{5}$"}, "lat": {"type": "number"}},
    "required": ["zip"],
    "additionalProperties": False,
}
STRICT = [function(PLACE, "go", strict=True), function(None, "ring")]


@pytest.mark.parametrize(
    ("start", "text", "taken"),
    [
        ("calls", CALL + 'go{lat:1.5,zip:<|"|>12345<|"|>}<tool_call|>', True),
        ("calls", CALL + 'go{zip:<|"|>12345<|"|>}<tool_call|>', True),
        ("calls", CALL + "ring{}<tool_call|>", True),
        ("calls", CALL + 'go{zip:<|"|>123456<|"|>}<tool_call|>', False),
        ("calls", CALL + "go{lat:1.5}<tool_call|>", False),
        ("calls", CALL + 'go{zip:"12345"}<tool_call|>', False),
        ("calls", CALL + 'go{"zip":<|"|>12345<|"|>}<tool_call|>', False),
        ("calls", CALL + "rm{}<tool_call|>", False),
        ("calls", '{"name": "ring", "arguments": {}}', False),
        ("calls", "Sure. " + CALL + "ring{}<tool_call|>", False),
        ("free", "Hello <|tool", True),
        ("free", "", True),
        ("free", "Sure. " + CALL + "ring{}<tool_call|>", True),
        ("free", CALL + "ring{}<tool_call|>", True),
        ("free", "Sure. " + CALL + "ring{a:1}<tool_call|>", False),
    ],
)
@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize("are_special", [True, False])
def test_texts_that_are_allowed(
    start: str, text: str, taken: bool, parallel: bool, are_special: bool, special: Tokenizer, plain: Tokenizer
) -> None:
    compiler, tokenizer = (SPECIAL, special) if are_special else (COMPILER, plain)
    tokens = special.encode(text, add_special_tokens=False) if are_special else COMPILER._tokenizer.tokenize_str(text)
    matcher = compiler.compile(constraint(STRICT, tokenizer, start=start, parallel=parallel))()._matcher
    num_taken = matcher.try_consume_tokens(tokens)
    assert (num_taken == len(tokens) and matcher.is_accepting()) is taken


def test_several_calls_need_parallel_calls(special: Tokenizer) -> None:
    tokens = special.encode(2 * (CALL + "ring{}<tool_call|>"), add_special_tokens=False)
    for parallel in (True, False):
        matcher = SPECIAL.compile(constraint(STRICT, special, parallel=parallel))()._matcher
        assert (matcher.try_consume_tokens(tokens) == len(tokens)) is parallel


def test_properties_are_written_in_the_order_of_templates(special: Tokenizer) -> None:
    """Jinja's dictsort ignores case."""
    parameters = {"type": "object", "properties": {name: {"type": "null"} for name in "bAc"}, "required": ["b"]}
    guided = constraint([function(parameters)], special)
    for text, taken in (("A:null,b:null,c:null", True), ("b:null", True), ("b:null,A:null", False), ("A:null", False)):
        tokens = special.encode(f"{CALL}f{{{text}}}<tool_call|>", add_special_tokens=False)
        assert (SPECIAL.compile(guided)()._matcher.try_consume_tokens(tokens) == len(tokens)) is taken


def test_bounds_that_the_server_sets(special: Tokenizer) -> None:
    defaults = SchemaDefaults(additional_properties=False, max_string=3)
    parameters = {"type": "object", "properties": {"any": {}, "text": {"type": "string"}}, "required": ["any", "text"]}
    guided = constraint([function(parameters)], special, defaults=defaults)
    for value, taken in (("abc", True), ("abcd", False)):
        for text in (f'any:<|"|>{value}<|"|>,text:<|"|><|"|>', f'any:{{{value}:1}},text:<|"|>{value}<|"|>'):
            tokens = special.encode(f"{CALL}f{{{text}}}<tool_call|>", add_special_tokens=False)
            assert (SPECIAL.compile(guided)()._matcher.try_consume_tokens(tokens) == len(tokens)) is taken


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        ({"type": "string", "format": "date"}, "#/properties/x: format cannot be enforced"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems cannot be enforced"),
        ({"not": {}}, "not cannot be enforced"),
        ({"enum": [1, 2], "minimum": 2}, "minimum cannot be enforced"),
        ({"$ref": "#/$defs/n", "maximum": 3}, "maximum cannot be enforced"),
        ({"anyOf": [{"maximum": 3}], "maximum": 2, "type": "integer"}, "anyOf/0: maximum cannot be enforced"),
    ],
)
def test_a_strict_tool_with_what_cannot_be_enforced_is_refused(schema: Any, why: str, special: Tokenizer) -> None:
    parameters = {"type": "object", "properties": {"x": schema}, "$defs": {"n": {"type": "integer"}}}
    SPECIAL.compile(constraint([function(parameters)], special))
    with pytest.raises(RequestError, match=f"tool f: the JSON schema is not supported at .*{why}"):
        constraint([function(parameters, strict=True)], special)


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        ({"enum": []}, "no value satisfies it"),
        ({"anyOf": [False]}, "no value satisfies it"),
        ({"$ref": "#/$defs/none"}, "refers to '#/\\$defs/none', which is not there"),
        ({"allOf": [{"$ref": "#/properties/x"}]}, "nested too deep, or refers to itself"),
        ({"type": "string", "minLength": 3, "maxLength": 2}, "minLength and maxLength allow no value"),
        ({"type": "array", "maxItems": 0, "minItems": 1}, "allow no value"),
        ({"type": "text"}, "the type 'text' is unknown"),
        ({"type": 3}, "x/type: the value is of the wrong type"),
        ({"type": ["string", 3]}, "x/type: not all of it is text"),
        ({"properties": []}, "x/properties: the value is of the wrong type"),
        ({"required": [[]]}, "x/required: not all of it is text"),
        ({"allOf": [{"required": ["a"]}, {"required": 3}]}, "x/allOf/1/required: the value is of the wrong type"),
        ({"pattern": 3}, "x/pattern: the value is of the wrong type"),
        ({"items": 3}, "x/items: no value satisfies it"),
    ],
)
def test_schemas_that_are_refused(schema: Any, why: str, special: Tokenizer) -> None:
    parameters = {"type": "object", "properties": {"x": schema}, "required": ["x"]}
    with pytest.raises(RequestError, match=f"tool f: the JSON schema is not supported at .*{why}"):
        constraint([function(parameters)], special)
