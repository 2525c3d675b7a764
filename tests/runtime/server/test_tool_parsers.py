"""Tool calls in streams of text: alike however the text is cut, content where malformed; and their grammars."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmc.runtime.guided.constraint import Guided
from llmc.runtime.request_error import RequestError
from llmc.runtime.server.errors import ApiError
from llmc.runtime.server.tools.definitions import read_tools
from llmc.runtime.server.tools.parser import ToolCallParser
from llmc.runtime.server.tools.plain_json import PlainJsonParser
from llmc.runtime.server.tools.registry import TOOL_PARSERS, choose_parsers
from llmc.runtime.text.tokenizer import Tokenizer

from support.guides import COMPILER, random_text
from support.told_answers import cut, message, special_tokenizer

NAMES = {"weather", "add", "no_args"}
PARSERS = ("hermes", "llama3_json", "mistral")
CLASSES: dict[str, type[ToolCallParser]] = {
    **TOOL_PARSERS,
    "json": PlainJsonParser,
}  # the latter for models that have no format


def function(name: str, **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **fields}}


WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 9}, "unit": {"enum": ["C", "F"]}},
    "required": ["city"],
    "additionalProperties": False,
}
ADD = {
    "type": "object",
    "properties": {"a": {"$ref": "#/$defs/n"}, "b": {"$ref": "#/$defs/n"}},
    "required": ["a", "b"],
    "additionalProperties": False,
    "$defs": {"n": {"type": "integer", "minimum": 0, "maximum": 999}},
}
TOOLS = [function("weather", parameters=WEATHER), function("add", parameters=ADD), function("no_args")]
SCHEMAS = {"weather": WEATHER, "add": ADD, "no_args": {"type": "object", "additionalProperties": False}}


def parse(name: str, pieces: list[str]) -> tuple[str, list[tuple[str, str]]]:
    parser = CLASSES[name](NAMES)
    deltas = [delta for piece in pieces for delta in parser.push(piece)]
    result = message(deltas + parser.finish())
    assert parser.num_calls == len(result[1])
    return result


PARIS = '{"city": "Paris"}'
ODD = '{"city": "a\\"}]</tool_call>[TOOL_CALLS]{;\\\\", "x": [{"y": []}, -1.5e+3, null]}'
CASES: dict[str, list[tuple[str, str, list[tuple[str, str]]]]] = {
    "hermes": [
        ("just text", "just text", []),
        ("a < b, a <tool b, </tool_call>", "a < b, a <tool b, </tool_call>", []),
        ("spaces stay \n ", "spaces stay \n ", []),
        (f'<tool_call>\n{{"name": "weather", "arguments": {PARIS}}}\n</tool_call>', "", [("weather", PARIS)]),
        (
            f'Sure.\n\n<tool_call>{{"name": "weather", "arguments": {ODD}}}</tool_call>\n'
            '<tool_call>\n{"name":"add","arguments":{"a":1,"b":2}}\n</tool_call> done',
            "Sure.done",
            [("weather", ODD), ("add", '{"a":1,"b":2}')],
        ),
        (f'<tool_call>{{"arguments": {PARIS}, "id": 3, "name": "weather"}}</tool_call>', "", [("weather", PARIS)]),
        ('<tool_call>{"name": "no_args"}</tool_call>', "", [("no_args", "{}")]),
        ('<tool_call>{"name": "no_args", "arguments": null}</tool_call>', "", [("no_args", "{}")]),
        ('<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("add", '{"a": 1}')]),
        # Several calls in one pair of markers, and a pair that is not closed.
        ('<tool_call>{"name": "no_args"}\n{"name": "add", "arguments": {}}', "", [("no_args", "{}"), ("add", "{}")]),
        # Malformed before the arguments: content.
        ("<tool_call>no JSON</tool_call>", "<tool_call>no JSON</tool_call>", []),
        ('x <tool_call>{"name": "rm"}</tool_call>', 'x <tool_call>{"name": "rm"}</tool_call>', []),
        ('<tool_call>{"name": 3}</tool_call>', '<tool_call>{"name": 3}</tool_call>', []),
        ('<tool_call>{"arguments": {}}</tool_call>', '<tool_call>{"arguments": {}}</tool_call>', []),
        ('<tool_call>{"name": "add", "arguments": 3}', '<tool_call>{"name": "add", "arguments": 3}', []),
        ('<tool_call>{"name": "add", "argu', '<tool_call>{"name": "add", "argu', []),
        ('<tool_call>bad <tool_call>{"name": "no_args"}</tool_call>', "<tool_call>bad", [("no_args", "{}")]),
        # Cut off or broken inside the arguments: they are told as they are.
        ('<tool_call>{"name": "add", "arguments": {"a": 1, "b"', "", [("add", '{"a": 1, "b"')]),
        ('<tool_call>{"name": "add", "arguments": {"a": 1}</tool_call>', "", [("add", '{"a": 1}')]),
        ('<tool_call>{"name": "add", "arguments": {"a": 1</tool_call>', "", [("add", '{"a": 1')]),
        ('<tool_call>{"name": "no_args"}</tool_c', "", [("no_args", "{}")]),
    ],
    "llama3_json": [
        ("Hello {", "Hello {", []),
        (" \n text ", " \n text ", []),
        (f'{{"name": "weather", "parameters": {PARIS}}}', "", [("weather", PARIS)]),
        (f'<|python_tag|>{{"name": "weather", "parameters": {ODD}}}', "", [("weather", ODD)]),
        (
            f'{{"type": "function", "name": "weather", "parameters": {PARIS}}}; {{"name": "add", "arguments": {{}}}}',
            "",
            [("weather", PARIS), ("add", "{}")],
        ),
        ('{"city": "Paris"}', '{"city": "Paris"}', []),
        ('{"name": "Ada", "parameters": {}}', '{"name": "Ada", "parameters": {}}', []),
        ("<|python_tag|>print(1)", "<|python_tag|>print(1)", []),
        ('{"name": "no_args"} and more', "and more", [("no_args", "{}")]),
    ],
    "mistral": [
        ("text [TOOL", "text [TOOL", []),
        (f'[TOOL_CALLS] [{{"name": "weather", "arguments": {PARIS}, "id": "a"}}]', "", [("weather", PARIS)]),
        (
            f'I see. [TOOL_CALLS][{{"name": "weather", "arguments": {ODD}}}, {{"name": "add", "arguments": {{}}}}]',
            "I see.",
            [("weather", ODD), ("add", "{}")],
        ),
        (f'[TOOL_CALLS]{{"name": "weather", "arguments": {PARIS}}}', "", [("weather", PARIS)]),
        (
            f"[TOOL_CALLS]weather[ARGS]{PARIS}[TOOL_CALLS]add[CALL_ID]abc123xyz[ARGS]{{}}",
            "",
            [("weather", PARIS), ("add", "{}")],
        ),
        ("[TOOL_CALLS]rm[ARGS]{}", "[TOOL_CALLS]rm[ARGS]{}", []),
        ("[TOOL_CALLS] [3]", "[TOOL_CALLS] [3]", []),
        ("[TOOL_CALLS]", "[TOOL_CALLS]", []),
    ],
}
ALL_CASES = [(name, *case) for name, cases in CASES.items() for case in cases]


@pytest.mark.parametrize(("name", "text", "content", "calls"), ALL_CASES)
def test_calls_and_content(name: str, text: str, content: str, calls: list[tuple[str, str]]) -> None:
    assert parse(name, [text]) == (content, calls)
    assert parse(name, list(text)) == (content, calls)


@settings(max_examples=300)
@given(case=st.sampled_from(ALL_CASES), borders=st.lists(st.integers(0, 200), max_size=12))
def test_cuts_do_not_matter(case: tuple[str, str, str, list[tuple[str, str]]], borders: list[int]) -> None:
    name, text, content, calls = case
    assert parse(name, cut(text, borders)) == (content, calls)


PIECES = st.sampled_from(
    [
        *("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", '{"name": "add"', '{"name": "rm"'),
        *(
            ', "arguments": ',
            ', "parameters": ',
            "{",
            "}",
            "[",
            "]",
            '"',
            "\\",
            ",",
            ":",
            ";",
            " ",
            "\n",
            "weather",
            "1",
        ),
        *('{"a": 1}', "é", "<", "null", "\\u00e9", "\\ud800"),
    ]
)


@settings(max_examples=600)
@given(
    name=st.sampled_from(PARSERS),
    pieces=st.lists(PIECES, max_size=25),
    borders=st.lists(st.integers(0, 150), max_size=10),
)
def test_any_text_is_read_alike_however_it_is_cut(name: str, pieces: list[str], borders: list[int]) -> None:
    text = "".join(pieces)
    whole = parse(name, [text])
    assert parse(name, cut(text, borders)) == whole
    if not whole[1]:
        assert whole[0] == text, "without a call every character is content"


@given(
    lead=st.sampled_from(["", "Let me see. "]),
    calls=st.lists(
        st.tuples(
            st.sampled_from(sorted(NAMES)),
            st.dictionaries(st.text(max_size=8), st.text(max_size=12) | st.integers() | st.none(), max_size=3),
        ),
        min_size=1,
        max_size=3,
    ),
    borders=st.lists(st.integers(0, 300), max_size=12),
    ascii_only=st.booleans(),
)
def test_calls_survive_and_no_markup_is_content(
    lead: str, calls: list[tuple[str, dict[str, Any]]], borders: list[int], ascii_only: bool
) -> None:
    arguments = [json.dumps(values, ensure_ascii=ascii_only) for _, values in calls]
    objects = [f'{{"name": "{name}", "arguments": {text}}}' for (name, _), text in zip(calls, arguments, strict=True)]
    expected = [(name, text) for (name, _), text in zip(calls, arguments, strict=True)]
    hermes = lead + "\n".join(f"<tool_call>\n{text}\n</tool_call>" for text in objects)
    assert parse("hermes", cut(hermes, borders)) == (lead.rstrip(), expected)
    assert parse("mistral", cut(f"{lead}[TOOL_CALLS] [{', '.join(objects)}]", borders)) == (lead.rstrip(), expected)
    assert parse("llama3_json", cut("; ".join(objects), borders)) == ("", expected)


@pytest.mark.parametrize("name", PARSERS)
def test_arguments_stream_as_they_come(name: str) -> None:
    text = {
        "hermes": '<tool_call>{"name": "add", "arguments": {"a": "long',
        "llama3_json": '{"name": "add", "parameters": {"a": "long',
        "mistral": '[TOOL_CALLS] [{"name": "add", "arguments": {"a": "long',
    }[name]
    parser = CLASSES[name](NAMES)
    _, calls = message([delta for char in text for delta in parser.push(char)])
    assert calls == [("add", '{"a": "long')]


def test_ids_fit_the_templates() -> None:
    def first_id(name: str, text: str) -> str:
        return str(next(part["id"] for delta in CLASSES[name](NAMES).push(text) for part in delta.tool_calls))

    assert len(first_id("mistral", '[TOOL_CALLS][{"name": "no_args"}]')) == 9
    assert first_id("hermes", '<tool_call>{"name": "no_args"}').startswith("call_")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return special_tokenizer(tmp_path_factory.mktemp("tokenizer"), [])


@pytest.mark.parametrize("name", [*PARSERS, "json"])
@pytest.mark.parametrize("choice", ["required", function("add")])
@pytest.mark.parametrize("parallel", [True, False])
def test_grammars_write_what_the_parsers_read(name: str, choice: Any, parallel: bool, tokenizer: Tokenizer) -> None:
    use = read_tools(TOOLS, choice, parallel)
    assert use is not None
    text = CLASSES[name].grammar(use.tools, use.parallel, tokenizer)
    make = COMPILER.compile(Guided.lark("tools", f"start: calls\n{text}"))
    for seed in range(6):
        written = random_text(make(), seed, num_free=15)
        content, calls = parse(name, [written])
        assert content == ""
        assert len(calls) >= 1
        assert len(calls) == 1 or use.parallel
        for called, arguments in calls:
            assert choice == "required" or called == "add"
            jsonschema_rs.validator_for(SCHEMAS[called]).validate(json.loads(arguments))


@pytest.mark.parametrize(
    ("name", "text", "allowed"),
    [
        ("hermes", "Hello <tool", True),
        ("hermes", 'Sure. <tool_call>\n{"name": "add", "arguments": {"a": 1,"b": 2}}\n</tool_call>', True),
        ("hermes", '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>', False),
        ("hermes", '<tool_call>\n{"name": "rm", "arguments": {}}\n</tool_call>', False),
        ("llama3_json", "Hello {", True),
        ("llama3_json", "", True),
        ("llama3_json", "\n\n Hello", True),
        ("llama3_json", '\n{"city": "Bath"}', False),
        ("llama3_json", '{"name": "no_args", "parameters": {}}', True),
        ("llama3_json", '{"name": "rm", "parameters": {}}', False),
        ("mistral", "Hello [TOOL", True),
        ("mistral", 'Sure. [TOOL_CALLS] [{"name": "no_args", "arguments": {}}]', True),
        ("mistral", '[TOOL_CALLS] [{"name": "no_args", "arguments": {"a": 1}}]', False),
    ],
)
@pytest.mark.parametrize("parallel", [True, False])
def test_free_text_with_strict_calls(name: str, text: str, allowed: bool, parallel: bool, tokenizer: Tokenizer) -> None:
    use = read_tools(TOOLS, "auto", parallel)
    assert use is not None
    rules = CLASSES[name].grammar(use.tools, parallel, tokenizer)
    matcher = COMPILER.compile(Guided.lark("tools", f"start: free\n{rules}"))()._matcher
    tokens = COMPILER._tokenizer.tokenize_str(text)
    taken = matcher.try_consume_tokens(tokens)
    assert (taken == len(tokens) and matcher.is_accepting()) is allowed


def test_a_second_strict_call_needs_parallel_calls(tokenizer: Tokenizer) -> None:
    call = '<tool_call>\n{"name": "no_args", "arguments": {}}\n</tool_call>'
    tokens = COMPILER._tokenizer.tokenize_str(f"Twice: {call} and {call}")
    for parallel in (True, False):
        use = read_tools(TOOLS, "auto", parallel)
        assert use is not None
        rules = TOOL_PARSERS["hermes"].grammar(use.tools, parallel, tokenizer)
        matcher = COMPILER.compile(Guided.lark("tools", f"start: free\n{rules}"))()._matcher
        assert (matcher.try_consume_tokens(tokens) == len(tokens)) is parallel


def test_markers_that_are_special_tokens(tmp_path: Path) -> None:
    special = special_tokenizer(tmp_path, ["[TOOL_CALLS]", "[ARGS]"])
    use = read_tools(TOOLS, "required", True)
    assert use is not None
    rules = TOOL_PARSERS["mistral"].grammar(use.tools, True, special)
    assert rules.splitlines()[0] == "calls: (<[1]> body)+"
    assert rules.splitlines()[3].startswith('tool_0: "weather" <[2]> %json')
    assert "lead: TEXT <[1]>" in rules


@pytest.mark.parametrize(
    ("tools", "choice", "message"),
    [
        ([function("a"), function("a")], None, "two tools have the name 'a'"),
        ([function("a", parameters={"const": 10**30})], None, "at most 64 bits"),
        ([function("a")], function("b"), "names 'b', but the tools are a"),
        ([], "required", "tool_choice requires a call, and there are no tools"),
        (None, function("a"), "tool_choice requires a call, and there are no tools"),
    ],
)
def test_tools_that_are_refused(tools: Any, choice: Any, message: str) -> None:
    with pytest.raises(ApiError, match=message):
        read_tools(tools, choice, None)


def test_tool_choice() -> None:
    assert read_tools(TOOLS, "none", None) is None
    assert read_tools(None, "none", None) is None
    assert read_tools([], "auto", None) is None
    auto = read_tools(TOOLS, None, None)
    assert auto is not None
    assert (auto.required, auto.named, auto.parallel, len(auto.tools)) == (False, False, True, 3)
    named = read_tools(TOOLS, function("add"), True)
    assert named is not None
    assert (named.required, named.named, named.parallel, [tool.name for tool in named.tools]) == (
        True,
        True,
        False,
        ["add"],
    )
    chosen = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [function("add")]}}
    allowed = read_tools(TOOLS, chosen, False)
    assert allowed is not None
    assert (allowed.required, allowed.parallel, [tool.name for tool in allowed.tools]) == (True, False, ["add"])


def test_a_bad_schema_is_named_with_its_tool(tokenizer: Tokenizer) -> None:
    bad = function("odd", strict=True, parameters={"properties": {"x": {"not": {}}}})
    use = read_tools([*TOOLS, bad], "required", None)
    assert use is not None
    text = TOOL_PARSERS["hermes"].grammar(use.tools, True, tokenizer)
    guided = Guided.lark("tools", f"start: calls\n{text}", [tool.guided() for tool in use.tools])
    with pytest.raises(RequestError, match="tool odd: the JSON schema is not supported at #/properties/x"):
        COMPILER.compile(guided)


# What chat templates show of calls, as their sources write it.
TAGGED = r"""{{ "an object in <tool_call></tool_call>:\n<tool_call>\n{\"name\": <name>, \"arguments\": <a>}" }}"""
IN_PARTS = """{{- "<tool_call>\n" }}\n{{- '{"name": <function-name>, "parameters": <unused>}\n' }} ', "parameters": '"""
AS_XML = """{{ '<tool_call>\n<function=name>\n<parameter=city>' }}"""
BY_KEY = "<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key>"
LISTED = """{{ '"parameters": ' }}{{ "[TOOL_CALLS] [" }}"""
BARE = """{{- '{"name": "' + call.name + '", ' }}{{- '"parameters": ' }}"""
FORMAT = """{{- 'Respond in the format {"name": function name, "parameters": dictionary of arguments}.' }}"""
SCHEMA_ONLY = """{{- '"parameters": ' }}{{ '{"name": "' + f.name + '", "description": "", "parameters": ' }}"""
THINKS = "{{ '<think>\\n\\n</think>' }}"
CALLS = "{{- '<|tool_call>call:' + function['name'] + '{' -}}"
LFM2 = """{%- set s = s + "List of tools: <|tool_list_start|>[" %}"""
LFM2_5 = """{%- set ns.system = ns.system + "List of tools: [" -%}"""
LLAMA_4 = """{{- "in the format of [func_name1(params_name1=params_value1...), func_name2(params)]\\n" }}"""
CHANNEL = "{{- '<|channel>thought\\n<channel|>' -}}"


@pytest.mark.parametrize(
    ("template", "tokens", "tool", "reasoning"),
    [
        (TAGGED, [], None, None),
        (TAGGED, ["<tool_call>"], "hermes", None),
        (TAGGED + THINKS, ["<tool_call>", "<think>", "</think>"], "hermes", "qwen3"),
        (TAGGED, ["<tool_call>", "</think>"], "hermes", None),
        (TAGGED + THINKS, ["<tool_call>", "</think>", "<｜Assistant｜>"], "hermes", "deepseek_r1"),
        (IN_PARTS, ["<tool_call>", "<|python_tag|>"], "hermes", None),
        (AS_XML, ["<tool_call>"], None, None),
        (BY_KEY + THINKS, ["<tool_call>", "</think>"], None, "qwen3"),
        (BARE, ["<|python_tag|>"], "llama3_json", None),
        (BARE, [], None, None),
        (FORMAT, ["<|python_tag|>"], "llama3_json", None),
        (SCHEMA_ONLY, ["<|python_tag|>"], None, None),
        ("{{ '<｜Assistant｜>' }}", ["<|python_tag|>", "</think>", "<｜Assistant｜>"], None, "deepseek_r1"),
        (LISTED, ["[TOOL_CALLS]"], "mistral", None),
        (CALLS + CHANNEL, ["<|tool_call>", "<channel|>"], "gemma4", "gemma4"),
        (CALLS + CHANNEL, ["<channel|>"], None, "gemma4"),
        (CALLS, ["<|tool_call>", "<channel|>"], "gemma4", None),
        (LFM2, ["<|tool_call_start|>"], "lfm2", None),
        (LFM2_5 + THINKS, ["<|tool_call_start|>", "</think>"], "lfm2", "qwen3"),
        (LFM2_5, ["<|tool_list_start|>"], None, None),
        (LLAMA_4 + BARE, ["<|python_start|>"], "pythonic", None),
        (LLAMA_4 + BARE, ["<|python_tag|>"], "pythonic", None),
        (LLAMA_4, [], None, None),
        ("{{ '<|channel|>analysis' }}", ["<|channel|>", "<channel|>"], None, None),
        (None, ["<tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "</think>"], None, None),
    ],
)
def test_parsers_that_templates_show(
    template: str | None, tokens: list[str], tool: str | None, reasoning: str | None, tmp_path: Path
) -> None:
    chosen = choose_parsers("auto", None, special_tokenizer(tmp_path, tokens, template))
    assert (chosen.tool and chosen.tool.name, chosen.reasoning and chosen.reasoning.name) == (tool, reasoning)


def test_parsers_by_name(tmp_path: Path) -> None:
    tokenizer = special_tokenizer(tmp_path, ["[TOOL_CALLS]", "</think>"], LISTED + THINKS)
    chosen = choose_parsers("qwen", "deepseek_r1", tokenizer)
    assert chosen.tool is TOOL_PARSERS["hermes"]
    assert chosen.reasoning is not None
    assert choose_parsers("none", "none", tokenizer) == choose_parsers(None, None, None)
    with pytest.raises(ValueError, match=r"--tool-call-parser 'Hermes' is unknown: use auto, none, hermes, qwen"):
        choose_parsers("Hermes", None, None)
    with pytest.raises(ValueError, match="--reasoning-parser 'r1' is unknown"):
        choose_parsers(None, "r1", None)


def test_every_parser_has_a_name_of_its_own() -> None:
    assert {parser.name for parser in TOOL_PARSERS.values()} == {*PARSERS, "gemma4", "lfm2", "pythonic"}
    assert all(issubclass(parser, ToolCallParser) and parser.markers for parser in TOOL_PARSERS.values())
