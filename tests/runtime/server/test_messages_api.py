"""Anthropic's /v1/messages over HTTP: answers, events, tools, and errors in its shape."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from llmc.runtime.server.errors import ApiError
from llmc.runtime.server.protocol.message_requests import MessagesRequest
from llmc.runtime.server.protocol.response_answers import MessageAnswer, MessageErrorAnswer

from support.responses import CITY, events_of
from support.server_harness import Running, running_server

PATH = "/v1/messages"
TOOL = {"name": "weather", "description": "How it is.", "input_schema": CITY}


@pytest.fixture(scope="module")
def running(english_artifact: Path) -> Iterator[Running]:
    with running_server(english_artifact) as running:
        yield running


def message(running: Running, content: Any = "She was", **body: Any) -> dict[str, Any]:
    response = running.post(PATH, messages=[{"role": "user", "content": content}], **{"max_tokens": 8, **body})
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    MessageAnswer.model_validate(answer)
    return answer


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    MessageErrorAnswer.model_validate(response.json())
    if status != 500:  # which comes from outside of the layer that makes ids
        assert response.json()["request_id"] == response.headers["request-id"] == response.headers["x-request-id"]
    error: dict[str, Any] = response.json()["error"]
    return error


def test_an_answer_is_the_chats(running: Running) -> None:
    chat = running.chat("She was", max_tokens=8, seed=1)
    answer = message(running, seed=1)
    assert answer["content"] == [{"type": "text", "text": chat["choices"][0]["message"]["content"]}]
    assert (answer["stop_reason"], answer["stop_sequence"], answer["role"]) == ("max_tokens", None, "assistant")
    usage = answer["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == chat["usage"]["prompt_tokens"]
    assert usage["output_tokens"] == 8
    blocks = [{"type": "text", "text": "She was", "cache_control": {"type": "ephemeral"}}]
    assert message(running, blocks, seed=1)["content"] == answer["content"]
    system = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "She was"}]
    told = running.post("/v1/chat/completions", messages=system, max_tokens=8, seed=1).json()
    for given in ("Be short.", [{"type": "text", "text": "Be short."}]):
        text = message(running, seed=1, system=given)["content"][0]["text"]
        assert text == told["choices"][0]["message"]["content"]


def test_stop_sequences(running: Running) -> None:
    free = message(running, seed=1, max_tokens=20)["content"][0]["text"]
    word = free.split()[1]
    answer = message(running, seed=1, max_tokens=20, stop_sequences=[word])
    assert answer["content"][0]["text"] == free[: free.index(word)]
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", word)


def test_a_stream_adds_up_to_the_answer(running: Running) -> None:
    body = {"messages": [{"role": "user", "content": "She was"}], "max_tokens": 8, "seed": 1}
    events = events_of(running, PATH, **body)
    kinds = [event["type"] for event in events]
    deltas = [event["delta"]["text"] for event in events if event["type"] == "content_block_delta"]
    assert kinds == [
        *("message_start", "ping", "content_block_start"),
        *["content_block_delta"] * len(deltas),
        *("content_block_stop", "message_delta", "message_stop"),
    ]
    assert events[0]["message"]["content"] == []
    answer = message(running, seed=1)
    assert "".join(deltas) == answer["content"][0]["text"]
    assert events[-2]["delta"]["stop_reason"] == answer["stop_reason"]
    assert events[-2]["usage"]["output_tokens"] == answer["usage"]["output_tokens"]


def test_a_tool_is_used_and_answers(running: Running) -> None:
    asked = {"tools": [TOOL], "tool_choice": {"type": "any", "disable_parallel_tool_use": True}, "max_tokens": 90}
    answer = message(running, "How is it?", seed=3, **asked)
    (block,) = answer["content"]
    assert (block["type"], block["name"], answer["stop_reason"]) == ("tool_use", "weather", "tool_use")
    assert block["input"]["city"] in ("Bath", "York")
    named = message(running, "How is it?", seed=3, **{**asked, "tool_choice": {"type": "tool", "name": "weather"}})
    assert (named["content"][0]["name"], named["stop_reason"]) == ("weather", "tool_use")
    said = {"role": "user", "content": "How is it?"}
    events = events_of(running, PATH, messages=[said], seed=3, **asked)
    parts = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    assert {part["type"] for part in parts} == {"input_json_delta"}
    assert json.loads("".join(part["partial_json"] for part in parts)) == block["input"]
    result = {"type": "tool_result", "tool_use_id": block["id"], "content": [{"type": "text", "text": "rain"}]}
    told = [said, {"role": "assistant", "content": answer["content"]}, {"role": "user", "content": [result]}]
    after = running.post(PATH, messages=told, max_tokens=4, seed=1)
    assert after.json()["content"][0]["type"] == "text"


def test_an_answer_that_was_begun_goes_on(running: Running) -> None:
    messages = [{"role": "user", "content": "She was"}, {"role": "assistant", "content": "very"}]
    chat = {"continue_final_message": True, "add_generation_prompt": False}
    told = running.post("/v1/chat/completions", messages=messages, max_tokens=4, seed=1, **chat).json()
    answer = running.post(PATH, messages=messages, max_tokens=4, seed=1).json()
    assert answer["content"][0]["text"] == told["choices"][0]["message"]["content"]


def test_a_format(running: Running) -> None:
    config = {"format": {"type": "json_schema", "schema": CITY}}
    answer = message(running, "A city?", max_tokens=60, seed=1, output_config=config)
    assert json.loads(answer["content"][0]["text"])["city"] in ("Bath", "York")


def test_tokens_are_counted(running: Running) -> None:
    messages = [{"role": "user", "content": "She was"}]
    counted = running.post(f"{PATH}/count_tokens", messages=messages, model="tiny").json()
    usage = message(running)["usage"]
    assert counted == {"input_tokens": usage["input_tokens"] + usage["cache_read_input_tokens"]}


def test_thinking_is_a_block_of_its_own(english_artifact: Path) -> None:
    with running_server(english_artifact, reasoning_parser="deepseek_r1") as running:
        (block,) = message(running, seed=1)["content"]
        assert (block["type"], block["signature"], bool(block["thinking"])) == ("thinking", "", True)


def test_errors_have_anthropics_shape(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    said = [{"role": "user", "content": "x"}]
    bad = error_of(running.post(PATH, messages=said, temperature=-1), 400)
    assert (bad["type"], "temperature" in bad["message"]) == ("invalid_request_error", True)
    long = error_of(running.post(PATH, messages=[{"role": "user", "content": "a " * 3000}]), 400)
    assert long["message"].startswith("prompt is too long: ")
    for more in (4000, 511):
        much = error_of(running.post(PATH, messages=said, max_tokens=more), 400)
        assert much["message"].startswith("input length and `max_tokens` exceed context limit: ")
        assert much["code"] == "context_length_exceeded"
    assert error_of(running.post(PATH, messages=said, model="claude"), 404)["type"] == "not_found_error"
    assert error_of(running.client.get(PATH), 405)["type"] == "invalid_request_error"
    assert error_of(running.client.get(f"{PATH}/x"), 404)["type"] == "not_found_error"
    huge = running.client.post(PATH, content=b"x" * (running.server.config.max_body_bytes + 1))
    assert error_of(huge, 413)["type"] == "request_too_large"

    def broken(*_: object) -> None:
        raise ApiError("it took too long", status=408, code="request_timeout")

    monkeypatch.setattr("llmc.runtime.server.answers.check_end", broken)
    assert error_of(running.post(PATH, messages=said), 408)["type"] == "timeout_error"
    last = events_of(running, PATH, messages=said)[-1]
    assert (last["type"], last["error"]) == (
        "error",
        {"type": "timeout_error", "message": "it took too long", "code": "request_timeout"},
    )

    def unforeseen(*_: object) -> None:
        raise KeyError("secret")

    monkeypatch.setattr("llmc.runtime.server.answers.submit", unforeseen)
    failed = error_of(running.post(PATH, messages=said), 500)
    assert (failed["type"], "secret" in failed["message"]) == ("api_error", False)


def test_keys(english_artifact: Path) -> None:
    with running_server(english_artifact, api_keys=("one",)) as running:
        body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
        assert error_of(running.client.post(PATH, json=body), 401)["type"] == "authentication_error"
        for headers in ({"x-api-key": "two"}, {"x-api-key": ""}, {"x-api-key": "one2"}):
            assert running.client.post(PATH, json=body, headers=headers).status_code == 401
        for headers in ({"x-api-key": "one"}, {"Authorization": "Bearer one"}):
            assert running.client.post(PATH, json=body, headers=headers).status_code == 200


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0: use the role user or assistant"),
        (
            {"messages": [{"role": "user", "content": [{"type": "sound"}]}]},
            "messages.0.content.0: models here read text",
        ),
        ({"messages": [{"role": "user", "content": []}]}, "messages.0.content"),
        (
            {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
            "tools.0: only tools that the client runs are called",
        ),
        ({"tool_choice": {"type": "some"}}, "tool_choice: use the type auto, any, none or tool"),
        ({"tool_choice": {"type": []}}, "tool_choice: use the type auto, any, none or tool"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers is not supported"),
        ({"thinking": {"type": "deep"}}, "thinking.type"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format"),
    ],
)
def test_what_is_refused(running: Running, body: dict[str, Any], why: str) -> None:
    error = error_of(
        running.post(PATH, **{"messages": [{"role": "user", "content": "x"}], "max_tokens": 1, **body}), 400
    )
    assert why in error["message"]


def test_messages_of_a_conversation() -> None:
    body = {
        "messages": [
            {"role": "user", "content": "a"},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "t", "signature": ""},
                    {"type": "redacted_thinking", "data": "x"},
                    {"type": "text", "text": "b"},
                    {"type": "tool_use", "id": "1", "name": "f", "input": {"x": "é"}},
                ],
            },
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": "1"}, {"type": "text", "text": "c"}],
            },
        ],
        "thinking": {"type": "disabled"},
    }
    chat = MessagesRequest.model_validate(body).chat()
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": "é"}'}}
    assert chat.messages == [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", "reasoning_content": "t", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": ""},
        {"role": "user", "content": "c"},
    ]
    assert chat.chat_template_kwargs == {"enable_thinking": False}
