"""Tool calls as Python writes them: JSON arguments that say the same, alike however the text is cut."""

from __future__ import annotations

import ast
import json
from typing import Any

import jsonschema_rs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmc.runtime.guided.constraint import Guided
from llmc.runtime.request_error import RequestError
from llmc.runtime.server.tools.definitions import read_tools
from llmc.runtime.server.tools.python_text import value_as_json
from llmc.runtime.server.tools.pythonic import Lfm2Parser, PythonicParser
from llmc.runtime.text.tokenizer import Tokenizer

from support.guides import COMPILER, random_text
from support.told_answers import cut, message, special_tokenizer

NAMES = {"weather", "add", "add_two", "files.list"}
PARSERS = {"lfm2": Lfm2Parser, "pythonic": PythonicParser}
MARKERS = {name: parser.markers for name, parser in PARSERS.items()}
Calls = list[tuple[str, str]]


def parse(name: str, pieces: list[str]) -> tuple[str, Calls]:
    parser = PARSERS[name](NAMES)
    deltas = [delta for piece in pieces for delta in parser.push(piece)]
    result = message(deltas + parser.finish())
    assert parser.num_calls == len(result[1])
    return result


# Between markers, which are written as « and ».
CASES: list[tuple[str, str, Calls]] = [
    ("just text", "just text", []),
    ("a [b](c) <|tool_ » <|pyth", "a [b](c) <|tool_ » <|pyth", []),
    (" spaces stay \n ", " spaces stay \n ", []),
    ('«[weather(city="Paris")]»', "", [("weather", '{"city":"Paris"}')]),
    ("«[add()]»", "", [("add", "{}")]),
    (
        "Sure.\n\n«[weather(city='Rome', unit=\"C\"), add_two(a=1, b=-2.50)]»\n«[files.list()]» done",
        "Sure.done",
        [("weather", '{"city":"Rome","unit":"C"}'), ("add_two", '{"a":1,"b":-2.50}'), ("files.list", "{}")],
    ),
    # What ends a value, a call or an answer outside a text is text inside one.
    ("«[weather(city='a\"}]),(:»«', n=1)]»", "", [("weather", '{"city":"a\\"}]),(:»«","n":1}')]),
    (
        "«[add(a={'b': [1, [], {}], 'c': {'d': ''}}, t=True, f=False, n=None,)]»",
        "",
        [("add", '{"a":{"b":[1,[],{}],"c":{"d":""}},"t":true,"f":false,"n":null}')],
    ),
    ("«[add(a=[1, 2,], b={'c': 1,},)]»", "", [("add", '{"a":[1,2],"b":{"c":1}}')]),
    ("« [ add ( a = 1 ,\n b = [ 2 , 'x' ] ) ] »", "", [("add", '{"a":1,"b":[2,"x"]}')]),
    # Escapes of Python, and of JSON where they differ; raw line breaks; three quotes.
    (r"«[add(a='\n\t\\\'\"\x41\u00e9\101\N{BULLET}\q\/')]»", "", [("add", r'''{"a":"\n\t\\'\"AéA•\\q/"}''')]),
    ("«[add(a='x\ny\\\nz')]»", "", [("add", '{"a":"x\\nyz"}')]),
    ("""«[add(a='''it's "a" \n''', b=\"\"\"\"x\"\"\")]»""", "", [("add", '{"a":"it\'s \\"a\\" \\n","b":"\\"x"}')]),
    (r"«[add(a='\ud83d\ude00\U0001F600')]»", "", [("add", '{"a":"\\ud83d\\ude00😀"}')]),
    ("«[add(a=12345678901234567890, b=1_000, c=0x1F, d=.5, e=1., f=+1e-3)]»", "",
     [("add", '{"a":12345678901234567890,"b":1000,"c":31,"d":0.5,"e":1.0,"f":1.0e-3}')]),
    # JSON's words and keys in quotes; a call without brackets; calls in JSON.
    ("«[add(a=true, 'b c'=null, d-e=false)]»", "", [("add", '{"a":true,"b c":null,"d-e":false}')]),
    ("«add(a=1)»", "", [("add", '{"a":1}')]),
    ('«[{"name": "add", "arguments": {"a": 1}}, {"name": "weather", "arguments": {}}]»', "",
     [("add", '{"a": 1}'), ("weather", "{}")]),
    # Calls that are not closed.
    ("«[add(a=1)]«[add_two()]", "", [("add", '{"a":1}'), ("add_two", "{}")]),
    ("«[add(a=1)", "", [("add", '{"a":1}')]),
    # Malformed before the arguments: content.
    ("«[rm()]»", "«[rm()]»", []),
    ("x «[add(1, 2)]»", "x «[add(1, 2)]»", []),
    ("«[add(**{'a': 1})]»", "«[add(**{'a': 1})]»", []),
    ("«[add", "«[add", []),
    ("«[]»", "«[]»", []),
    ("«bad «[add()]»", "«bad", [("add", "{}")]),
    ('«[{"name": "rm", "arguments": {}}]»', '«[{"name": "rm", "arguments": {}}]»', []),
    # Of equal names, readers of JSON take the last.
    ("«[add(a=1, a=2)]»", "", [("add", '{"a":1,"a":2}')]),
    ("«[add(größe=1, 'm²'=2)]»", "", [("add", '{"größe":1,"m²":2}')]),
    ("«[add(m²=2)]»", "«[add(m²=2)]»", []),
    ("«[add(a='x\\\r\ny')]»", "", [("add", '{"a":"xy"}')]),
    # Cut off inside the arguments.
    ("«[add(a=1, b", "", [("add", '{"a":1')]),
    ("«[add(a=Tru", "", [("add", '{"a":')]),
    ("«[add(a='tex\\u00", "", [("add", '{"a":"tex')]),
    ("«[add(a=[1, ", "", [("add", '{"a":[1')]),
    # Broken inside the arguments: the rest is content, without the end of the calls.
    ("«[add(a=1]»", "]", [("add", '{"a":1')]),
    ("«[add(a=x)]» so", "x)] so", [("add", '{"a":')]),
    ("«[add(a=1 + 2)]»", "+ 2)]", [("add", '{"a":1')]),
    ("«[add(a=1, rm(2))]»", ", rm(2))]", [("add", '{"a":1')]),
    ("«[add(a={1: 2})]»", "1: 2})]", [("add", '{"a":{')]),
    (r"«[add(a='b\xq')]»", r"\xq')]", [("add", '{"a":"b')]),
    ("«[add(a=007)]»", "007)]", [("add", '{"a":')]),
    ("«[add(a=1), rm(b=2)]»", ", rm(b=2)]", [("add", '{"a":1}')]),
    ('«[add(a=1), {"name": "rm"}]»', ', {"name": "rm"}]', [("add", '{"a":1}')]),
]  # fmt: skip
# Of an answer without markers.
BARE: list[tuple[str, str, Calls]] = [
    ('[weather(city="Paris")]', "", [("weather", '{"city":"Paris"}')]),
    (" \n[add(a=1), add_two()]\nDone.", "Done.", [("add", '{"a":1}'), ("add_two", "{}")]),
    ("[add(a=1)] «[add_two()]»", "", [("add", '{"a":1}'), ("add_two", "{}")]),
    ("[add(a=1)]»", "", [("add", '{"a":1}')]),
    ("[add(a=1] so", "] so", [("add", '{"a":1')]),
    ("[add(a=x)]» so", "x)] so", [("add", '{"a":')]),
    ("\u00a0[add(a=1)]", "\u00a0[add(a=1)]", []),
    ("[1] says so", "[1] says so", []),
    (" [rm()]", " [rm()]", []),
    ("add(a=1)", "add(a=1)", []),
    ("Well: [add(a=1)]", "Well: [add(a=1)]", []),
]


def marked(name: str, text: str) -> str:
    opening, closing = MARKERS[name]
    return text.replace("«", opening).replace("»", closing)


def all_cases() -> list[tuple[str, str, str, Calls]]:
    found = [(name, *case) for name in PARSERS for case in CASES] + [("pythonic", *case) for case in BARE]
    return [
        (name, marked(name, text), marked(name, content), [(called, marked(name, told)) for called, told in calls])
        for name, text, content, calls in found
    ]


ALL_CASES = all_cases()


@pytest.mark.parametrize(("name", "text", "content", "calls"), ALL_CASES)
def test_calls_and_content(name: str, text: str, content: str, calls: Calls) -> None:
    assert parse(name, [text]) == (content, calls)
    assert parse(name, list(text)) == (content, calls)


@settings(max_examples=300)
@given(case=st.sampled_from(ALL_CASES), borders=st.lists(st.integers(0, 120), max_size=12))
def test_cuts_do_not_matter(case: tuple[str, str, str, Calls], borders: list[int]) -> None:
    name, text, content, calls = case
    assert parse(name, cut(text, borders)) == (content, calls)


PIECES = st.sampled_from(
    ["«", "»", "[", "add(", "add", "weather(", "rm(", "a=", "b=", "'k':", '"', "'", "'''", "\\", "\\u", "\\x41",
     "\\ud800", *"]){},:=; \n*", "<|", "1", "-", ".5", "True", "None", "null", "word", "é",
     '{"name": "add", "arguments": {']
)  # fmt: skip


@settings(max_examples=800)
@given(
    name=st.sampled_from(sorted(PARSERS)),
    pieces=st.lists(PIECES, max_size=25),
    borders=st.lists(st.integers(0, 150), max_size=10),
)
def test_any_text_is_read_alike_however_it_is_cut(name: str, pieces: list[str], borders: list[int]) -> None:
    text = marked(name, "".join(pieces))
    whole = parse(name, [text])
    assert parse(name, cut(text, borders)) == whole
    if not whole[1]:
        assert whole[0] == text, "without a call every character is content"


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=20) | st.lists(PIECES, max_size=5).map("".join),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip


@settings(max_examples=250)
@given(
    name=st.sampled_from(sorted(PARSERS)),
    lead=st.sampled_from(["", "Let me see. "]),
    calls=st.lists(
        st.tuples(
            st.sampled_from(sorted(NAMES)),
            st.dictionaries(st.from_regex("[A-Za-z_]{1,5}", fullmatch=True), VALUES, max_size=3),
        ),
        min_size=1,
        max_size=3,
    ),
    borders=st.lists(st.integers(0, 300), max_size=12),
)
def test_arguments_survive(name: str, lead: str, calls: list[tuple[str, dict[str, Any]]], borders: list[int]) -> None:
    written = [
        f"{called}({', '.join(f'{key}={value!r}' for key, value in values.items())})" for called, values in calls
    ]
    text = f"[{', '.join(written)}]"
    if name == "lfm2" or lead:
        text = f"{lead}{MARKERS[name][0]}{text}{MARKERS[name][1]}"
    content, found = parse(name, cut(text, borders))
    assert content == lead.rstrip()
    assert [(called, json.loads(arguments)) for called, arguments in found] == calls


@settings(max_examples=500)
@given(st.from_regex(r"[+-]?[0-9xXoObB_.eE+j-]{1,8}", fullmatch=True))
def test_numbers_are_pythons(word: str) -> None:
    try:
        value = ast.literal_eval(word)
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        value = None
    found = value_as_json(word)
    if found is not None:
        assert not isinstance(value, complex | None)
        assert json.loads(found) == value
    elif isinstance(value, int | float):
        # Python computes these, or takes several signs.
        assert set(word[1:]) & set("+-")


def test_deep_nesting_is_read() -> None:
    depth = 3000
    ((_, arguments),) = parse("pythonic", ["[add(a=" + "[" * depth + "]" * depth + ")]"])[1]
    assert arguments == '{"a":' + "[" * depth + "]" * depth + "}"


@pytest.mark.parametrize("name", PARSERS)
def test_arguments_stream_as_they_come(name: str) -> None:
    parser = PARSERS[name](NAMES)
    text = marked(name, "«[add(n=1, a='long")
    _, calls = message([delta for char in text for delta in parser.push(char)])
    assert calls == [("add", '{"n":1,"a":"long')]


ENDING = [COMPILER._tokenizer.tokenize_str(text)[0] for text in ('"', ")", "}", "]", "=", ":", ",", "0")]


def function(parameters: Any, name: str = "f", **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters, **fields}}


MIXED = {
    "type": "object",
    "properties": {
        "count": {"type": ["integer", "null"], "minimum": -3, "maximum": 9},
        "a key": {"anyOf": [{"type": "string", "minLength": 2, "maxLength": 5}, {"type": "boolean"}]},
        "list": {
            "type": "array", "minItems": 1, "maxItems": 3, "items": {"type": "number", "minimum": 0, "maximum": 1},
        },
        "pairs": {"type": "object", "additionalProperties": {"type": "integer", "minimum": 0, "maximum": 99}},
        "fixed": {"enum": ["x", "", 3, None, True, ["y", {"z": "{"}]]},
        "day": {"type": "string", "format": "date"},
        "tree": {"$ref": "#/$defs/node"},
    },
    "required": ["count", "list", "tree"],
    "additionalProperties": False,
    "$defs": {
        "node": {
            "type": "object",
            "properties": {"leaf": {"type": "boolean"}, "sub": {"type": "array", "items": {"$ref": "#/$defs/node"}}},
            "required": ["leaf"],
            "additionalProperties": False,
        }
    },
}  # fmt: skip
SCHEMAS: dict[str, Any] = {
    "mixed": MIXED,
    "none": {"type": "object", "properties": {}, "additionalProperties": False},
    "open": {"type": "object"},
    "by_ref": {"$ref": "#/$defs/a", "$defs": {"a": {"type": "object", "properties": {"x": {"const": "'\"\\"}}}}},
    # In the order of the schema, whatever is required.
    "named": {
        "properties": {"m": {"type": "null"}, "größe": {"type": "null"}, "m²": {"type": "boolean"}},
        "required": ["m²", "größe"],
    },
    "either": {
        "anyOf": [
            {"properties": {"a": {"type": "boolean"}}, "required": ["a"]},
            {"properties": {"b": {"type": "null"}}, "required": ["b"]},
        ]
    },
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return special_tokenizer(tmp_path_factory.mktemp("tokenizer"), [])


def grammar(
    name: str, tools: list[dict[str, Any]], tokenizer: Tokenizer, *, start: str = "calls", parallel: bool = False
) -> Guided:
    use = read_tools(tools, "required", parallel)
    assert use is not None
    return Guided.lark("tools", f"start: {start}\n{PARSERS[name].grammar(use.tools, use.parallel, tokenizer)}")


@pytest.mark.parametrize("name", PARSERS)
@pytest.mark.parametrize("parallel", [True, False])
def test_what_is_written_is_read_and_fits_the_schema(name: str, parallel: bool, tokenizer: Tokenizer) -> None:
    tools = [function(schema, called) for called, schema in SCHEMAS.items()]
    make = COMPILER.compile(grammar(name, tools, tokenizer, parallel=parallel))
    for seed in range(12):
        text = random_text(make(), seed, num_free=40, ending=ENDING)
        parser = PARSERS[name](SCHEMAS)
        content, calls = message(parser.push(text) + parser.finish())
        assert content == "", text
        assert len(calls) >= 1
        assert len(calls) == 1 or parallel
        for called, arguments in calls:
            # The text may have numbers that floats do not reach.
            value = json.loads(arguments, parse_float=lambda digits: min(float(digits), 1e300))
            jsonschema_rs.validator_for(SCHEMAS[called]).validate(value)


@pytest.mark.parametrize(
    ("name", "text", "allowed"),
    [
        ("lfm2", "Hello <|tool", True),
        ("lfm2", "Sure. «[mixed(count=None, list=[0.5], tree={\"leaf\": True})]»", True),
        ("lfm2", "«[mixed(count=1, list=[0, 1],tree={\"leaf\":False, \"sub\": []})]»", True),
        ("lfm2", "«[mixed(list=[0], count=1, tree={\"leaf\": True})]»", False),
        ("lfm2", "«[mixed(count=1, list=[2], tree={\"leaf\": True})]»", False),
        ("lfm2", "«[open(any_name=[{\"k\": None}], other=-1.5e3)]»", True),
        ("lfm2", "«[none(a=1)]»", False),
        ("lfm2", "«[rm()]»", False),
        ("pythonic", "Hello [", True),
        ("pythonic", "", True),
        ("pythonic", "\n[1]", False),
        ("pythonic", "So «[none()]", False),
        ("pythonic", "\u00a0[none(a=3)]", True),
        ("pythonic", "[none()]", True),
        ("pythonic", "[named(m=None, größe=None, \"m²\"=True)]", True),
        ("pythonic", "[named(m=None, größe=None, m²=True)]", False),
        ("pythonic", "[named(\"m²\"=True, größe=None)]", False),
        ("pythonic", "[rm()]", False),
        ("pythonic", "[either(a=True)]", True),
        ("pythonic", "[either(a=None)]", False),
    ],
)  # fmt: skip
def test_free_text_with_strict_calls(name: str, text: str, allowed: bool, tokenizer: Tokenizer) -> None:
    tools = [function(schema, called) for called, schema in SCHEMAS.items()]
    matcher = COMPILER.compile(grammar(name, tools, tokenizer, start="free"))()._matcher
    tokens = COMPILER._tokenizer.tokenize_str(marked(name, text))
    taken = matcher.try_consume_tokens(tokens)
    assert (taken == len(tokens) and matcher.is_accepting()) is allowed


def test_numbers_that_json_cannot_write_are_refused(tokenizer: Tokenizer) -> None:
    for value in (float("inf"), {"k": [float("nan")]}):
        tools = [function({"properties": {"a": {"enum": [1, value]}}}, "f")]
        with pytest.raises(RequestError, match="a number is not finite"):
            grammar("pythonic", tools, tokenizer)


def test_markers_that_are_special_tokens(special_tokens: Tokenizer) -> None:
    use = read_tools([function({}, "add")], "required", True)
    assert use is not None
    rules = Lfm2Parser.grammar(use.tools, True, special_tokens).splitlines()
    assert (rules[0], rules[2]) == ("calls: <[1]> body", "body: bracketed <[2]>")
    rules = PythonicParser.grammar(use.tools, True, special_tokens).splitlines()
    assert rules[0] == "calls: bracketed | <[3]> bracketed <[4]>"


@pytest.fixture
def special_tokens(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return special_tokenizer(tmp_path_factory.mktemp("special"), [*Lfm2Parser.markers, *PythonicParser.markers])


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        ({"properties": {"a": {"type": "array", "uniqueItems": True}}}, "uniqueItems cannot be enforced"),
        ({"properties": {"a": {"type": "string", "contentEncoding": "base64"}}}, "contentEncoding cannot be enforced"),
        ({"enum": [{}]}, "a list of whole calls"),
    ],
)
def test_what_a_strict_tool_may_not_ask_for(schema: Any, why: str, tokenizer: Tokenizer) -> None:
    with pytest.raises(RequestError, match=why):
        grammar("lfm2", [function(schema, strict=True)], tokenizer)
