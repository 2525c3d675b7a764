"""Constraints, tool calls and reasoning over HTTP, streaming and not."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest

from llmc.runtime.guided.compiler import GuideCompiler, TokenGuide
from llmc.runtime.guided.constraint import Guided
from llmc.runtime.llm import LLM
from llmc.runtime.params import SamplingParams
from llmc.runtime.speculation import parse_speculation

from support.server_harness import Running, error_of, running_server

CITY = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[A-Z][a-z]{2,9}$"},
        "kind": {"enum": ["town", "village"]},
        "people": {"type": "integer", "minimum": 1, "maximum": 9999},
    },
    "required": ["name", "kind", "people"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "city", "strict": True, "schema": CITY}}
WEATHER = {
    "type": "object",
    "properties": {"city": {"enum": ["Bath", "York"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "weather", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "bell"}},
]
NAMED = {"type": "function", "function": {"name": "weather"}}
_CLOSED = "disable_additional_properties"


@pytest.fixture(scope="module")
def running(english_artifact: Path) -> Iterator[Running]:
    with running_server(english_artifact, tool_call_parser="hermes") as running:
        yield running


def streamed(running: Running, content: str, **body: Any) -> tuple[dict[str, Any], str, int]:
    """The message that a stream's deltas add up to, its finish reason, and how many deltas carried arguments."""
    messages = [{"role": "user", "content": content}]
    told: dict[str, Any] = {"content": "", "reasoning_content": "", "calls": []}
    reasons, num_arguments = [], 0
    for event in running.events("/v1/chat/completions", messages=messages, **body):
        for choice in event["choices"]:
            delta = choice["delta"]
            told["content"] += delta.get("content") or ""
            told["reasoning_content"] += delta.get("reasoning_content") or ""
            for part in delta.get("tool_calls", ()):
                if "id" in part:
                    assert part["index"] == len(told["calls"])
                    told["calls"].append({"name": part["function"]["name"], "arguments": ""})
                num_arguments += bool(part["function"]["arguments"])
                told["calls"][part["index"]]["arguments"] += part["function"]["arguments"]
            if choice["finish_reason"]:
                reasons.append(choice["finish_reason"])
    assert len(reasons) == 1
    return told, reasons[0], num_arguments


# --- constraints ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_response_format_json_schema(running: Running, seed: int) -> None:
    asked = {"response_format": FORMAT, "max_tokens": 200, "seed": seed}
    choice = running.chat("Tell me of a city.", **asked)["choices"][0]
    assert choice["finish_reason"] == "stop"
    jsonschema_rs.validator_for(CITY).validate(json.loads(choice["message"]["content"]))
    told, reason, _ = streamed(running, "Tell me of a city.", **asked)
    assert (told["content"], reason) == (choice["message"]["content"], "stop")


def test_constrained_answers_have_the_same_bits_in_company_and_offline(
    running: Running, english_artifact: Path
) -> None:
    sampling: dict[str, Any] = {"max_tokens": 200, "temperature": 0.8, "top_p": 0.95, "top_k": 50}

    def ask(seed: int) -> str:
        body = {"guided_json": CITY, "seed": seed, **sampling}
        return str(running.complete("The city of", **body)["choices"][0]["text"])

    alone = [ask(seed) for seed in range(6)]
    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(ask, range(6))) == alone
    guided = Guided.json_schema(CITY)
    params = [SamplingParams(seed=seed, guided=guided, **sampling) for seed in range(6)]
    with LLM(english_artifact, num_threads=1) as llm:
        offline = llm.generate(["The city of"] * 6, params)
    assert [output.outputs[0].text for output in offline] == alone


def test_constrained_answers_have_the_same_bits_with_guesses(running: Running, english_artifact: Path) -> None:
    """The server asks its mask workers for as many masks as there are guesses, streaming and not."""
    asked = [{"response_format": FORMAT, "max_tokens": 200, "seed": seed, "temperature": 0.8} for seed in range(4)]

    def answers(server: Running) -> list[tuple[Any, Any]]:
        def ask(body: dict[str, Any]) -> tuple[Any, Any]:
            message = server.chat("Tell me of a city.", **body)["choices"][0]["message"]
            return message["content"], streamed(server, "Tell me of a city.", **body)[0]["content"]

        with ThreadPoolExecutor(4) as pool:
            return list(pool.map(ask, asked))

    plain = answers(running)
    with running_server(english_artifact, speculation=parse_speculation("ngram:6:always")) as guessing:
        assert answers(guessing) == plain
        assert guessing.engine.engine.stats.accepted_tokens > 0
    for told, same in plain:
        jsonschema_rs.validator_for(CITY).validate(json.loads(told))
        assert told == same


@pytest.mark.parametrize(
    ("constraint", "pattern"),
    [
        ({"guided_regex": r"[0-9]{3}-[a-z]{2}"}, r"[0-9]{3}-[a-z]{2}"),
        ({"guided_choice": ["yes", "no, never"]}, r"yes|no, never"),
        ({"guided_grammar": 'start: "a" | "b" start'}, r"b*a"),
        ({"structured_outputs": {"regex": "x{4}"}}, r"x{4}"),
        ({"structured_outputs": {"choice": ["one", "two"]}}, r"one|two"),
        ({"structured_outputs": {"json": {"enum": [1, "é"]}}}, '1|"é"'),
    ],
)
def test_other_constraints(running: Running, constraint: dict[str, Any], pattern: str) -> None:
    answer = running.complete("It is a truth", max_tokens=100, seed=1, n=3, **constraint)
    for choice in answer["choices"]:
        assert re.fullmatch(pattern, choice["text"])
        assert choice["finish_reason"] == "stop"


@pytest.mark.parametrize("field", ["response_format", "structured_outputs"])
def test_structural_tags(running: Running, field: str) -> None:
    tag = {"triggers": ["e"], "structures": [{"begin": "e<", "schema": {"enum": [1, 2]}, "end": ">"}]}
    asked = {"type": "structural_tag", **tag} if field == "response_format" else {"structural_tag": json.dumps(tag)}
    text = running.complete("It is a truth", max_tokens=60, seed=1, **{field: asked})["choices"][0]["text"]
    assert "e<" in text
    assert re.fullmatch(r"([^e]|e<[12]>)*(e|e<|e<[12])?", text)


def test_json_object_and_text(running: Running) -> None:
    body = {"response_format": {"type": "json_object"}, "max_tokens": 400, "seed": 3, "logit_bias": {"62": 4}}
    choice = running.chat("JSON, please.", **body)["choices"][0]
    assert choice["message"]["content"].startswith("{")
    if choice["finish_reason"] == "stop":
        assert isinstance(json.loads(choice["message"]["content"]), dict)
    plain = running.chat("Hello", max_tokens=8, seed=1)
    text = running.chat("Hello", max_tokens=8, seed=1, response_format={"type": "text"})
    assert text["choices"][0]["message"] == plain["choices"][0]["message"]


def test_constraints_are_read_and_compiled_beside_the_loop(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """A large one would otherwise stand between two tokens of everybody else."""
    threads: dict[str, str] = {}
    make, compile_ = Guided.json_schema, GuideCompiler.compile

    def noted_make(schema: Any, **options: Any) -> Guided:
        threads["make"] = threading.current_thread().name
        return make(schema, **options)

    def noted_compile(self: GuideCompiler, guided: Guided) -> Any:
        threads["compile"] = threading.current_thread().name
        return compile_(self, guided)

    monkeypatch.setattr(Guided, "json_schema", noted_make)
    monkeypatch.setattr(GuideCompiler, "compile", noted_compile)
    for path, body in (
        ("completions", {"prompt": "x"}),
        ("chat/completions", {"messages": [{"role": "user", "content": "x"}], "tools": TOOLS}),
    ):
        threads.clear()
        response = running.post(f"/v1/{path}", **body, response_format=FORMAT, max_tokens=2)
        assert response.status_code == 200, response.text
        assert {name.split("_")[0] for name in threads.values()} == {"llmc-compile"}
        assert set(threads) == {"make", "compile"}


def test_max_tokens_cuts_a_constrained_answer(running: Running) -> None:
    choice = running.chat("A city?", response_format=FORMAT, max_tokens=4, seed=1)["choices"][0]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["content"].startswith("{")


@pytest.mark.parametrize(
    ("constraint", "param", "message"),
    [
        ({"response_format": {"type": "xml"}}, "response_format", "use the type text, json_object"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "required"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": 3}}},
            "response_format.json_schema.schema",
            "valid dictionary",
        ),
        ({"guided_choice": []}, "guided_choice", "at least 1"),
        ({"guided_regex": "("}, None, "unclosed group"),
        ({"guided_json": {"const": "x" * 100_000}}, "guided_json", "at most 8192 are taken"),
        ({"guided_regex": "x" * 9000}, "guided_regex", "at most 8192 are taken"),
        ({"structured_outputs": {_CLOSED: 3}}, f"structured_outputs.{_CLOSED}", "valid boolean, not 3"),
        ({"guided_json": {"properties": {"a": {"not": {}}}}}, None, "#/properties/a"),
        ({"guided_json": CITY, "guided_regex": "a"}, "guided_json", "exclude each other"),
        ({"structured_outputs": {"xml": "a"}}, "structured_outputs", "'xml' is not supported: use one of json, regex"),
    ],
)
def test_constraints_that_are_refused(
    running: Running, constraint: dict[str, Any], param: str | None, message: str
) -> None:
    error = error_of(running.post("/v1/completions", prompt="x", **constraint), 400)
    assert error["param"] == param
    assert message in error["message"]


def test_a_plain_request_does_not_wait_for_masks(english_artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is one seat, and a guided request whose mask does not come: it leaves the seat, and has it back later."""
    wanted, gate, compute = threading.Event(), threading.Event(), TokenGuide.mask

    def late(guide: TokenGuide) -> Any:
        wanted.set()
        assert gate.wait(60)
        return compute(guide)

    guided: dict[str, Any] = {"guided_regex": "[a-z]{4} [0-9]{3}", "seed": 1, "n": 3, "max_tokens": 30}
    plain: dict[str, Any] = {"seed": 2, "max_tokens": 8}
    with running_server(english_artifact, max_num_seqs=1) as running, ThreadPoolExecutor(2) as pool:
        alone = running.complete("The city of", **guided)["choices"], running.complete("It is", **plain)["choices"]
        monkeypatch.setattr(TokenGuide, "mask", late)
        held = pool.submit(lambda: running.complete("The city of", **guided)["choices"])
        try:
            assert wanted.wait(60)
            assert pool.submit(lambda: running.complete("It is", **plain)["choices"]).result(60) == alone[1]
            assert not held.done()
        finally:
            gate.set()
        assert held.result(60) == alone[0]


def test_what_schemas_leave_open(english_artifact: Path) -> None:
    open_city = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
    asked: dict[str, Any] = {"max_tokens": 400, "seed": 1, "temperature": 1.5, "n": 4}
    with running_server(english_artifact, guided_additional_properties=False, guided_max_string=12) as running:
        answer = running.complete("The city of", guided_json=open_city, **asked)
        for choice in answer["choices"]:
            city = json.loads(choice["text"])
            assert set(city) == {"name"}
            assert len(city["name"]) <= 12
        tool = {"type": "function", "function": {"name": "go", "parameters": open_city}}
        body = {**asked, "n": 1, "tools": [tool], "tool_choice": "required", "parallel_tool_calls": False}
        (call,) = running.chat("Go.", **body)["choices"][0]["message"]["tool_calls"]
        assert set(json.loads(call["function"]["arguments"])) == {"name"}
        # A request has the last word.
        free = {"json": {**open_city, "required": ["name", "x"]}, "disable_additional_properties": False}
        for choice in running.complete("The city of", structured_outputs=free, **asked)["choices"]:
            assert choice["finish_reason"] == "length" or set(json.loads(choice["text"])) >= {"name", "x"}


# --- tools ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_tool_choice_required(running: Running, seed: int) -> None:
    asked = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 150, "seed": seed}
    choice = running.chat("How is the weather?", **asked)["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    (call,) = choice["message"]["tool_calls"]
    assert call["type"] == "function"
    assert call["id"].startswith("call_")
    check_arguments(call["function"])
    told, reason, _ = streamed(running, "How is the weather?", **asked)
    assert (told["calls"], told["content"], reason) == ([call["function"]], "", "tool_calls")


@pytest.mark.parametrize("tools", [[], TOOLS])
def test_an_eos_is_a_token_and_no_text(running: Running, tools: list[dict[str, Any]]) -> None:
    """Parsers of tool calls see special tokens in the text; the one that ends it is not theirs."""
    (eos,) = running.server.tokenizer.eos_token_ids
    asked: dict[str, Any] = {
        **({"tools": tools} if tools else {}),
        "max_tokens": 5, "logit_bias": {str(eos): 100}, "temperature": 0, "logprobs": True, "return_token_ids": True,
    }  # fmt: skip
    answer = running.chat("Hi", **asked)
    (choice,) = answer["choices"]
    assert (choice["message"]["content"], choice["finish_reason"], choice["stop_reason"]) == ("", "stop", None)
    assert (choice["token_ids"], answer["usage"]["completion_tokens"]) == ([eos], 1)
    (entry,) = choice["logprobs"]["content"]
    assert entry["token"] == running.server.tokenizer.eos_token
    told, reason, _ = streamed(running, "Hi", **asked)
    assert (told["content"], reason) == ("", "stop")


def check_arguments(function: dict[str, str]) -> None:
    schema = WEATHER if function["name"] == "weather" else {"type": "object", "additionalProperties": False}
    jsonschema_rs.validator_for(schema).validate(json.loads(function["arguments"]))


def test_tool_choice_of_one_function(running: Running) -> None:
    asked = {"tools": TOOLS, "tool_choice": NAMED, "max_tokens": 150, "seed": 4}
    choice = running.chat("How is the weather?", **asked)["choices"][0]
    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["weather"]
    assert choice["finish_reason"] == "stop"
    told, _, num_arguments = streamed(running, "How is the weather?", **asked)
    check_arguments(told["calls"][0])
    assert num_arguments > 1, "arguments stream in pieces"


def test_parallel_calls(running: Running) -> None:
    # The model cannot know the format: a bias to "\n" has it go on with another call.
    newline = running.server.tokenizer.encode("\n", add_special_tokens=False)[0]
    asked = {"tools": TOOLS, "tool_choice": "required", "logit_bias": {str(newline): 50}, "max_tokens": 150, "seed": 1}
    choice = running.chat("How is the weather?", **asked)["choices"][0]
    calls = choice["message"]["tool_calls"]
    assert len(calls) > 1
    assert len({call["id"] for call in calls}) == len(calls)
    for call in calls[:-1]:
        check_arguments(call["function"])


def test_tools_that_need_not_be_called(running: Running) -> None:
    asked = {"tools": TOOLS, "max_tokens": 20, "seed": 5}
    choice = running.chat("Hello", **asked)["choices"][0]
    assert choice["message"]["content"]
    assert "tool_calls" not in choice["message"]
    assert streamed(running, "Hello", **asked)[0]["content"] == choice["message"]["content"]
    none = running.chat("Hello", tool_choice="none", **asked)
    assert none["choices"][0]["message"] == running.chat("Hello", max_tokens=20, seed=5)["choices"][0]["message"]


def test_strict_tools_leave_text_free(running: Running) -> None:
    strict = [{"type": "function", "function": {**tool["function"], "strict": True}} for tool in TOOLS]
    asked = {"max_tokens": 20, "seed": 5}
    message = running.chat("Hello", tools=strict, **asked)["choices"][0]["message"]
    assert message == running.chat("Hello", tools=TOOLS, **asked)["choices"][0]["message"]


def test_tools_or_an_answer_in_a_format(running: Running) -> None:
    seen = set()
    for seed in range(8):
        asked = {
            "tools": TOOLS,
            "parallel_tool_calls": False,
            "response_format": FORMAT,
            "temperature": 2,
            "seed": seed,
        }
        message = running.chat("A city?", max_tokens=200, **asked)["choices"][0]["message"]
        seen.add("tool_calls" in message)
        if "tool_calls" in message:
            check_arguments(message["tool_calls"][0]["function"])
        else:
            jsonschema_rs.validator_for(CITY).validate(json.loads(message["content"]))
    assert seen
    error = error_of(
        running.post(
            "/v1/chat/completions",
            messages=[{"role": "user", "content": "x"}],
            tools=TOOLS,
            guided_regex="a",
        ),
        400,
    )
    assert "regex and tools exclude each other" in error["message"]


def test_a_tool_with_a_bad_schema_is_named(running: Running) -> None:
    odd = {"type": "function", "function": {"name": "odd", "strict": True, "parameters": {"uniqueItems": True}}}
    body = {"messages": [{"role": "user", "content": "x"}], "tools": [*TOOLS, odd], "tool_choice": "required"}
    error = error_of(running.post("/v1/chat/completions", **body), 400)
    assert "tool odd: the JSON schema is not supported at #" in error["message"]


def test_a_model_without_a_format_of_calls(english_artifact: Path) -> None:
    with running_server(english_artifact) as running:
        body = {"messages": [{"role": "user", "content": "x"}], "tools": TOOLS}
        error = error_of(running.post("/v1/chat/completions", **body), 400)
        assert "--tool-call-parser" in error["message"]
        asked = {"tools": TOOLS, "parallel_tool_calls": False, "max_tokens": 150, "seed": 4}
        for choice in ("required", NAMED):
            answer = running.chat("How is the weather?", tool_choice=choice, **asked)["choices"][0]
            assert answer["finish_reason"] == ("tool_calls" if choice == "required" else "stop")
            (call,) = answer["message"]["tool_calls"]
            check_arguments(call["function"])
            told, reason, _ = streamed(running, "How is the weather?", tool_choice=choice, **asked)
            assert told["calls"] == [call["function"]]
            assert reason == answer["finish_reason"]
        plain = running.chat("Hello", max_tokens=8, seed=1)["choices"]
        assert running.chat("Hello", max_tokens=8, seed=1, tools=[], tool_choice="auto")["choices"] == plain


def test_an_unknown_parser_is_refused_at_the_start(english_artifact: Path) -> None:
    with pytest.raises(ValueError, match="'gpt' is unknown"), running_server(english_artifact, tool_call_parser="gpt"):
        pass


# --- reasoning --------------------------------------------------------------------------------------------------


def test_reasoning_and_enable_thinking(english_artifact: Path, tmp_path: Path) -> None:
    template = tmp_path / "thinking.jinja"
    template.write_text("{{ messages[0].content }}{% if enable_thinking is false %}<think></think>{% endif %}")
    with running_server(english_artifact, reasoning_parser="deepseek_r1", chat_template=template) as running:
        asked = {"max_tokens": 12, "seed": 2}
        thinking = running.chat("It is a truth", **asked)["choices"][0]["message"]
        assert thinking["reasoning_content"]
        assert thinking["content"] == ""
        told, _, _ = streamed(running, "It is a truth", **asked)
        assert told["reasoning_content"] == thinking["reasoning_content"]
        quiet = {"chat_template_kwargs": {"enable_thinking": False}}
        answer = running.chat("It is a truth", **asked, **quiet)["choices"][0]["message"]
        assert "reasoning_content" not in answer
        assert answer["content"]
