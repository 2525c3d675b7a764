"""/v1/responses over HTTP: answers, events, tools, formats, and what is kept for whom."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from llmc.runtime.server.chat_output import ChatDelta
from llmc.runtime.server.errors import ApiError
from llmc.runtime.server.protocol.response_answers import ResponseAnswer
from llmc.runtime.server.protocol.response_items import messages_of
from llmc.runtime.server.response_output import ResponseOutput
from llmc.runtime.server.response_store import ResponseStore, StoredResponse

from support.responses import CITY, PATH, events_of
from support.server_harness import Running, error_of, running_server

TOOL = {"type": "function", "name": "weather", "parameters": CITY}


@pytest.fixture(scope="module")
def running(english_artifact: Path) -> Iterator[Running]:
    with running_server(english_artifact, max_stored_responses=8) as running:
        yield running


def respond(running: Running, **body: Any) -> dict[str, Any]:
    response = running.post(PATH, **body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    ResponseAnswer.model_validate(answer)
    return answer


def plain(output: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Items without what is made anew for each answer."""
    return [{name: value for name, value in item.items() if name not in ("id", "call_id")} for item in output]


def test_an_answer_is_the_chats(running: Running) -> None:
    chat = running.chat("Mr. Darcy had never", max_tokens=12, seed=3, temperature=0.7)
    body = {"input": "Mr. Darcy had never", "max_output_tokens": 12, "seed": 3, "temperature": 0.7}
    answer = respond(running, **body, metadata={"a": "b"})
    (item,) = answer["output"]
    assert item["content"][0]["text"] == chat["choices"][0]["message"]["content"]
    assert (answer["status"], answer["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert item["status"] == "incomplete"
    assert answer["usage"]["input_tokens"] == chat["usage"]["prompt_tokens"]
    assert answer["usage"]["output_tokens"] == chat["usage"]["completion_tokens"] == 12
    assert (answer["metadata"], answer["temperature"], answer["model"]) == ({"a": "b"}, 0.7, "tiny")
    again = respond(running, **body)
    assert again["usage"]["input_tokens_details"]["cached_tokens"] >= 0
    parts = [{"role": "user", "content": [{"type": "input_text", "text": "Mr. Darcy had never"}]}]
    assert plain(respond(running, **{**body, "input": parts})["output"]) == plain(answer["output"])
    with_system = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Mr. Darcy had never"}]
    told = running.post("/v1/chat/completions", messages=with_system, max_tokens=12, seed=3, temperature=0.7).json()
    instructed = respond(running, **body, instructions="Be short.")
    assert instructed["output"][0]["content"][0]["text"] == told["choices"][0]["message"]["content"]


def test_a_stream_adds_up_to_the_answer(running: Running) -> None:
    body = {"input": "She was", "max_output_tokens": 10, "seed": 1}
    events = events_of(running, **body)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    kinds = [event["type"].removeprefix("response.") for event in events]
    deltas = kinds.count("output_text.delta")
    assert deltas >= 1
    assert kinds == [
        *("created", "in_progress", "output_item.added", "content_part.added"),
        *["output_text.delta"] * deltas,
        *("output_text.done", "content_part.done", "output_item.done", "incomplete"),
    ]
    final = events[-1]["response"]
    ResponseAnswer.model_validate(final)
    assert plain(final["output"]) == plain(respond(running, **body)["output"])
    text = "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
    assert text == final["output"][0]["content"][0]["text"]
    item = final["output"][0]
    assert {event["item_id"] for event in events if "item_id" in event} == {item["id"]}
    assert {event["response"]["id"] for event in events if "response" in event} == {final["id"]}
    assert running.client.get(f"{PATH}/{final['id']}").json() == final


def test_logprobs(running: Running) -> None:
    body = {"input": "She was", "max_output_tokens": 4, "seed": 1, "top_logprobs": 2}
    tokens = respond(running, **body)["output"][0]["content"][0]["logprobs"]
    chat = running.chat("She was", max_tokens=4, seed=1, logprobs=True, top_logprobs=2)["choices"][0]
    assert tokens == chat["logprobs"]["content"]
    events = events_of(running, **body)
    assert [one for event in events if event["type"].endswith("text.delta") for one in event["logprobs"]] == tokens


def test_a_function_call_and_its_result(running: Running) -> None:
    body = {"input": "How is the weather?", "tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}
    asked = {**body, "max_output_tokens": 100, "seed": 2}
    answer = respond(running, **asked)
    (call,) = answer["output"]
    assert (call["type"], call["name"], call["status"]) == ("function_call", "weather", "completed")
    assert json.loads(call["arguments"])["city"] in ("Bath", "York")
    assert (answer["status"], answer["tools"], answer["tool_choice"]) == ("completed", [TOOL], "required")
    events = events_of(running, **asked)
    kinds = [event["type"].removeprefix("response.") for event in events]
    deltas = [event["delta"] for event in events if event["type"] == "response.function_call_arguments.delta"]
    assert "".join(deltas) == call["arguments"]
    assert kinds == [
        *("created", "in_progress", "output_item.added"),
        *["function_call_arguments.delta"] * len(deltas),
        *("function_call_arguments.done", "output_item.done", "completed"),
    ]
    named = {"type": "function", "name": "weather"}
    assert respond(running, **{**asked, "tool_choice": named})["output"][0]["name"] == "weather"
    result = [{"type": "function_call_output", "call_id": call["call_id"], "output": "rain"}]
    after = respond(running, input=result, previous_response_id=answer["id"], max_output_tokens=4, seed=1)
    assert after["output"][0]["type"] == "message"


def test_a_format(running: Running) -> None:
    form = {"type": "json_schema", "name": "city", "schema": CITY, "strict": True}
    answer = respond(running, input="A city?", text={"format": form}, max_output_tokens=60, seed=1)
    assert json.loads(answer["output"][0]["content"][0]["text"])["city"] in ("Bath", "York")
    assert (answer["status"], answer["text"]["format"]) == ("completed", form)
    error = error_of(running.post(PATH, input="x", text={"format": {"type": "xml"}}), 400)
    assert (error["param"], "text.format" in error["message"]) == ("text.format", True)


def test_a_conversation_goes_on(running: Running) -> None:
    first = respond(running, input="She was", max_output_tokens=6, seed=1, instructions="Once only.")
    said = first["output"][0]["content"][0]["text"]
    second = respond(running, input="Why?", previous_response_id=first["id"], max_output_tokens=6, seed=1)
    messages = [
        {"role": "user", "content": "She was"},
        {"role": "assistant", "content": said},
        {"role": "user", "content": "Why?"},
    ]
    chat = running.post("/v1/chat/completions", messages=messages, max_tokens=6, seed=1).json()
    assert second["output"][0]["content"][0]["text"] == chat["choices"][0]["message"]["content"]
    running.client.delete(f"{PATH}/{first['id']}")
    third = respond(running, input="So?", previous_response_id=second["id"], max_output_tokens=2)
    assert third["usage"]["input_tokens"] > second["usage"]["input_tokens"]


def test_kept_answers(running: Running) -> None:
    answer = respond(running, input=[{"role": "user", "content": str(i)} for i in range(3)], max_output_tokens=1)
    url = f"{PATH}/{answer['id']}"
    assert running.client.get(url).json() == answer
    items = running.client.get(f"{url}/input_items", params={"order": "asc", "limit": "2"}).json()
    assert [item["content"][0]["text"] for item in items["data"]] == ["0", "1"]
    assert items["has_more"]
    rest = running.client.get(f"{url}/input_items", params={"order": "asc", "after": items["last_id"]}).json()
    assert ([item["content"][0]["text"] for item in rest["data"]], rest["has_more"]) == (["2"], False)
    for params in ({"limit": "0"}, {"order": "up"}, {"after": "x"}):
        assert error_of(running.client.get(f"{url}/input_items", params=params), 400)["param"] == next(iter(params))
    assert "close the connection" in error_of(running.post(f"{url}/cancel"), 400)["message"]
    assert error_of(running.client.get(url, params={"stream": "true"}), 400)["param"] == "stream"
    assert running.client.delete(url).json() == {"id": answer["id"], "object": "response", "deleted": True}
    assert error_of(running.client.get(url), 404)["code"] == "response_not_found"
    assert error_of(running.client.delete(url), 404)["code"] == "response_not_found"
    body = {"input": "x", "previous_response_id": answer["id"]}
    assert error_of(running.post(PATH, **body), 400)["code"] == "previous_response_not_found"
    unkept = respond(running, input="x", store=False, max_output_tokens=1)
    assert not unkept["store"]
    assert running.client.get(f"{PATH}/{unkept['id']}").status_code == 404


def test_answers_belong_to_their_key(english_artifact: Path) -> None:
    with running_server(english_artifact, api_keys=("one", "two")) as running:
        one, two = {"Authorization": "Bearer one"}, {"X-Api-Key": "two"}
        made = running.client.post(PATH, json={"input": "x", "max_output_tokens": 1}, headers=one).json()
        url = f"{PATH}/{made['id']}"
        assert running.client.get(url, headers={"X-Api-Key": "one"}).json() == made
        assert running.client.get(url).status_code == 401
        for answer in (
            running.client.get(url, headers=two),
            running.client.delete(url, headers=two),
            running.client.get(f"{url}/input_items", headers=two),
        ):
            assert error_of(answer, 404)["code"] == "response_not_found"
        body = {"input": "y", "previous_response_id": made["id"]}
        assert running.client.post(PATH, json=body, headers=two).status_code == 400


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"background": True}, "background"),
        ({"conversation": "c"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"truncation": "auto"}, "truncation"),
        ({"n": 2}, "n"),
        ({"tools": [{"type": "web_search"}]}, "tools.0"),
        ({"max_tokens": 3}, "max_tokens"),
        ({"max_output_tokens": 100000}, "max_output_tokens"),
        ({"input": "a " * 3000}, "input"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input.0.content.0.image_url",
        ),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input.0"),
        ({"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": {}}]}, "input.0.arguments"),
        ({"input": [1] * 1000}, "input.0"),
        ({"input": [{"type": []}]}, "input.0"),
        ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "tools": 5}}, "tool_choice.mode"),
        ({"input": []}, "input"),
        ({"stream_options": {}}, "stream_options"),
    ],
)
def test_what_is_refused(running: Running, body: dict[str, Any], param: str) -> None:
    assert error_of(running.post(PATH, **{"input": "x", **body}), 400)["param"] == param


def test_an_error_in_a_stream_is_an_event(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ApiError("it took too long", status=408, code="request_timeout")

    monkeypatch.setattr("llmc.runtime.server.answers.check_end", broken)
    last = events_of(running, input="x", max_output_tokens=2)[-1]
    assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
    assert last["response"]["error"] == {"code": "request_timeout", "message": "it took too long"}
    assert running.client.get(f"{PATH}/{last['response']['id']}").status_code == 404
    assert error_of(running.post(PATH, input="x"), 408)["code"] == "request_timeout"


def test_reasoning_is_an_item_of_its_own(english_artifact: Path) -> None:
    with running_server(english_artifact, reasoning_parser="deepseek_r1") as running:
        body = {"input": "She was", "max_output_tokens": 6, "seed": 1}
        (item,) = respond(running, **body)["output"]
        assert (item["type"], item["summary"], bool(item["content"][0]["text"])) == ("reasoning", [], True)
        events = events_of(running, **body)
        assert plain(events[-1]["response"]["output"]) == plain([item])
        assert events[-1]["response"]["usage"]["output_tokens_details"] == {"reasoning_tokens": 6}


# ---- parts -------------------------------------------------------------------------------------------------------


def test_items_end_where_the_next_begins() -> None:
    call = {"index": 0, "id": "call_1", "type": "function", "function": {"name": "f", "arguments": ""}}
    more = {"index": 0, "function": {"arguments": "{}"}}
    deltas = [ChatDelta(reasoning_content="Hm"), ChatDelta(content="a"), ChatDelta(tool_calls=(call,))]
    output = ResponseOutput("resp_1")
    events = [
        event
        for delta in [*deltas, ChatDelta(tool_calls=(more,)), ChatDelta(content="b")]
        for event in output.push(delta)
    ]
    events += output.finish("completed")
    assert [item["type"] for item in output.items] == ["reasoning", "message", "function_call", "message"]
    assert [event["item"] for event in events if event["type"] == "response.output_item.done"] == output.items
    added = [event["item"] for event in events if event["type"] == "response.output_item.added"]
    assert all(item["status"] == "in_progress" and not item.get("arguments") for item in added)
    assert messages_of(output.items) == [
        {"role": "assistant", "content": "a", "reasoning_content": "Hm", "tool_calls": [
            {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
        ]},
        {"role": "assistant", "content": "b"},
    ]  # fmt: skip
    empty = ResponseOutput("resp_1")
    list(empty.finish("completed"))
    assert empty.items[0]["content"][0]["text"] == ""


def test_what_is_kept_is_bounded() -> None:
    def answer(owner: int | None, name: str, num_bytes: int = 10) -> StoredResponse:
        return StoredResponse(owner, {"id": name}, (), ({"text": name},), num_bytes)

    store = ResponseStore(3, 1000)
    for number in range(4):
        store.put(answer(0, f"a{number}"))
    with pytest.raises(ApiError, match="no response 'a0'"):
        store.get(0, "a0")
    store.get(0, "a1")
    store.put(answer(1, "b"))
    store.get(1, "b")  # who holds most loses, and of that what was not used for longest
    store.get(0, "a1")
    with pytest.raises(ApiError, match="no response 'a2'"):
        store.get(0, "a2")
    store.put(answer(1, "huge", 1001))
    with pytest.raises(ApiError):
        store.get(1, "huge")
    store.put(answer(0, "large", 990))
    store.get(1, "b")
    assert store.history(0, "large") == ({"text": "large"},)
    with pytest.raises(ApiError):
        store.get(0, "a1")
    with pytest.raises(ApiError):
        store.get(1, "large")
    # A router that tries again stores the same id again.
    again = ResponseStore(3, 1000)
    for _ in range(3):
        again.put(answer(0, "x", 400))
    again.put(answer(1, "x", 10))
    again.put(answer(1, "y", 300))
    assert again.get(0, "x").num_bytes == 400
    assert again.get(1, "y").num_bytes == 300
    with pytest.raises(ApiError):
        again.get(1, "x")
    off = ResponseStore(0, 1000)
    off.put(answer(None, "c"))
    assert not off.enabled
    with pytest.raises(ApiError):
        off.get(None, "c")
