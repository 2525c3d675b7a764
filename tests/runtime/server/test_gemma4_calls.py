"""Tool calls as Gemma 4 writes them: JSON arguments that say the same, alike however the text is cut."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmc.runtime.server.reasoning import STYLES
from llmc.runtime.server.thoughts import ThoughtParser
from llmc.runtime.server.tools.gemma4 import Gemma4Parser
from llmc.runtime.server.tools.output import ChatOutputParser

from support.told_answers import cut, message

NAMES = {"weather", "add", "no_args"}
OPEN, CLOSE, Q = "<|tool_call>", "<tool_call|>", '<|"|>'


def parse(pieces: list[str]) -> tuple[str, list[tuple[str, str]]]:
    parser = Gemma4Parser(NAMES)
    deltas = [delta for piece in pieces for delta in parser.push(piece)]
    result = message(deltas + parser.finish())
    assert parser.num_calls == len(result[1])
    return result


def written(value: Any) -> str:
    """A value in the model's syntax, as its chat template shows it."""
    if isinstance(value, str):
        return f"{Q}{value}{Q}"
    if isinstance(value, dict):
        members = (f"{key}:{written(value[key])}" for key in sorted(value, key=str.lower))
        return "{" + ",".join(members) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(written, value)) + "]"
    return json.dumps(value)


def marked(text: str) -> str:
    """The text with the model's markers in place of «, » and '."""
    return text.replace("«", OPEN).replace("»", CLOSE).replace("'", Q)


CASES: list[tuple[str, str, list[tuple[str, str]]]] = [
    ("just text", "just text", []),
    ("a < b, <|tool_ b, »", "a < b, <|tool_ b, »", []),
    (" spaces stay \n ", " spaces stay \n ", []),
    ("«call:weather{city:'Paris'}»", "", [("weather", '{"city":"Paris"}')]),
    ("«call:no_args{}»", "", [("no_args", "{}")]),
    (
        "Sure.\n\n«call:weather{city:'Rome',unit:'C'}»\n«call:add{a:1,b:2}» done",
        "Sure.done",
        [("weather", '{"city":"Rome","unit":"C"}'), ("add", '{"a":1,"b":2}')],
    ),
    # What ends a value or a call outside a string is text inside one.
    ("«call:weather{city:'a\"}],:<|',n:1}»", "", [("weather", '{"city":"a\\"}],:<|","n":1}')]),
    (
        "«call:add{a:{b:[1,-2.50e+3,[],{}],c:{d:''}},t:true,f:false,n:null}»",
        "",
        [("add", '{"a":{"b":[1,-2.50e+3,[],{}],"c":{"d":""}},"t":true,"f":false,"n":null}')],
    ),
    ("«call:add{a:'line\n\t\\é\u2028'}»", "", [("add", '{"a":"line\\n\\t\\\\é\u2028"}')]),
    # Large numbers keep their digits.
    ("«call:add{a:12345678901234567890,b:0.10}»", "", [("add", '{"a":12345678901234567890,"b":0.10}')]),
    # White space, None as templates show it, and quotes that the format does not have.
    ("«call:add{ a : 1 ,\n b:[ 2 , 'x' ] , c:None }»", "", [("add", '{"a":1,"b":[2,"x"],"c":null}')]),
    ('«call:add{\'a:b\':1,"c":"d,\\"e"}»', "", [("add", '{"a:b":1,"c":"d,\\"e"}')]),
    ("«call:add{when:2024-05-01 noon,x:[a b,007]}»", "", [("add", '{"when":"2024-05-01 noon","x":["a b","007"]}')]),
    ("« call:add{filter[a]:1} »", "", [("add", '{"filter[a]":1}')]),
    # Calls that are not closed.
    ("«call:no_args{}«call:add{a:1}", "", [("no_args", "{}"), ("add", '{"a":1}')]),
    ("«call:no_args{}<tool_c", "", [("no_args", "{}")]),
    # Malformed before the arguments: content.
    ("«call:rm{}»", "«call:rm{}»", []),
    ("x «add{}»", "x «add{}»", []),
    ("«call:add", "«call:add", []),
    ("«call:add(a=1)»", "«call:add(a=1)»", []),
    ("«bad «call:no_args{}»", "«bad", [("no_args", "{}")]),
    # Cut off inside the arguments.
    ("«call:add{a:1,b", "", [("add", '{"a":1,')]),
    ("«call:add{a:tru", "", [("add", '{"a":')]),
    ("«call:add{a:'tex<|", "", [("add", '{"a":"tex')]),
    ("«call:add{a:[1,", "", [("add", '{"a":[1,')]),
    # Broken inside the arguments: the rest is content, without the end of the call.
    ("«call:add{a:1»", "", [("add", '{"a":1')]),
    ("«call:add{a:,b:2}» so", ",b:2} so", [("add", '{"a":')]),
    ("«call:add{a:1,}»", "}", [("add", '{"a":1,')]),
    ("«call:add{a:1]»»", "]»", [("add", '{"a":1')]),
    ("«call:add{a»", "a", [("add", "{")]),
    ('«call:add{a:"\\q"}»', '"\\q"}', [("add", '{"a":')]),
]
CASES = [(marked(text), marked(content), calls) for text, content, calls in CASES]


@pytest.mark.parametrize(("text", "content", "calls"), CASES)
def test_calls_and_content(text: str, content: str, calls: list[tuple[str, str]]) -> None:
    assert parse([text]) == (content, calls)
    assert parse(list(text)) == (content, calls)


@settings(max_examples=300)
@given(case=st.sampled_from(CASES), borders=st.lists(st.integers(0, 120), max_size=12))
def test_cuts_do_not_matter(case: tuple[str, str, list[tuple[str, str]]], borders: list[int]) -> None:
    text, content, calls = case
    assert parse(cut(text, borders)) == (content, calls)


PIECES = st.sampled_from(
    [OPEN, CLOSE, Q, "call:", "add{", "rm{", "a:", *'{}[],:"\\< \n', "<|", "1", "-", "true", "None", "word", "é"]
)


@settings(max_examples=300)
@given(pieces=st.lists(PIECES, max_size=25), borders=st.lists(st.integers(0, 150), max_size=10))
def test_any_text_is_read_alike_however_it_is_cut(pieces: list[str], borders: list[int]) -> None:
    text = "".join(pieces)
    whole = parse([text])
    assert parse(cut(text, borders)) == whole
    if not whole[1]:
        assert whole[0] == text, "without a call every character is content"


def without_quotes(text: str) -> bool:
    return Q not in text


KEYS = st.from_regex(r'[^\s:{}"<](?:[^:}<\x00-\x1f]{0,6}[^\s:}<])?', fullmatch=True)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=20).filter(without_quotes)
    | st.lists(st.sampled_from([OPEN, CLOSE, "{", "}", "]", ",", ":", '"', "\\", "<|", "\n"]), max_size=6).map("".join),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=8,
)  # fmt: skip


@settings(max_examples=200)
@given(
    lead=st.sampled_from(["", "Let me see. "]),
    calls=st.lists(
        st.tuples(st.sampled_from(sorted(NAMES)), st.dictionaries(KEYS, VALUES, max_size=4)), min_size=1, max_size=3
    ),
    borders=st.lists(st.integers(0, 300), max_size=12),
)
def test_arguments_survive(lead: str, calls: list[tuple[str, dict[str, Any]]], borders: list[int]) -> None:
    text = lead + "".join(f"{OPEN}call:{name}{written(arguments)}{CLOSE}" for name, arguments in calls)
    content, found = parse(cut(text, borders))
    assert content == lead.rstrip()
    assert [(name, json.loads(arguments)) for name, arguments in found] == calls
    assert parse(list(text)) == (content, found)


def test_deep_nesting_is_read() -> None:
    depth = 3000
    ((_, arguments),) = parse([marked("«call:add{a:" + "[" * depth + "]" * depth + "}»")])[1]
    assert arguments == '{"a":' + "[" * depth + "]" * depth + "}"


def test_arguments_stream_as_they_come() -> None:
    parser = Gemma4Parser(NAMES)
    _, calls = message([delta for char in marked("«call:add{n:1,a:'long") for delta in parser.push(char)])
    assert calls == [("add", '{"n":1,"a":"long')]


@settings(max_examples=200)
@given(borders=st.lists(st.integers(0, 250), max_size=10))
def test_thoughts_content_and_calls_in_one_answer(borders: list[int]) -> None:
    text = marked(
        "<|channel>thought\nI call.\n<channel|>\nSo:\n"
        "«call:weather{city:'<|channel>x<channel|>'}»«call:add{a:1}»<|channel>thought\n<channel|>"
    )
    assert STYLES["gemma4"].parser is ThoughtParser
    parser = ChatOutputParser(ThoughtParser(False), Gemma4Parser(NAMES))
    deltas = [delta for piece in cut(text, borders) for delta in parser.push(piece)] + parser.finish()
    assert "".join(delta.reasoning_content for delta in deltas) == "I call."
    assert message(deltas) == ("So:", [("weather", '{"city":"<|channel>x<channel|>"}'), ("add", '{"a":1}')])
    assert parser.called_tools
