"""Conversations with a model that writes calls and reasoning as Gemma 4 does, over HTTP, streaming and not."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest

from llmc.runtime.server.reasoning import STYLES
from llmc.runtime.server.tools.gemma4 import Gemma4Parser

from support.gemma4_chat import IDS, TEMPLATE, with_markers
from support.manifests import edit_manifest
from support.server_harness import Running, running_server

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "days": {"type": "array", "items": {"type": "integer", "minimum": 1, "maximum": 9}, "maxItems": 3},
        "unit": {"enum": ["C", "F"]},
    },
    "required": ["city", "unit"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": WEATHER}}]
THINK = {"chat_template_kwargs": {"enable_thinking": True}}


@pytest.fixture(scope="module")
def running(english_artifact: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    artifact = tmp_path_factory.mktemp("gemma4") / "artifact"
    shutil.copytree(english_artifact, artifact)
    (artifact / "tokenizer.json").write_text(with_markers())
    (artifact / "chat_template.jinja").write_text(TEMPLATE)
    edit_manifest(artifact, files={})  # files that it does not list are not checked
    with running_server(artifact) as running:
        yield running


def streamed(running: Running, **body: Any) -> tuple[dict[str, Any], str]:
    """The message of a stream, and its finish reason."""
    told: dict[str, Any] = {"content": "", "reasoning_content": "", "calls": []}
    reason = ""
    messages = [{"role": "user", "content": "How is the weather?"}]
    for event in running.events("/v1/chat/completions", messages=messages, **body):
        for choice in event["choices"]:
            delta = choice["delta"]
            told["content"] += delta.get("content") or ""
            told["reasoning_content"] += delta.get("reasoning_content") or ""
            for part in delta.get("tool_calls", ()):
                if "id" in part:
                    told["calls"].append(dict(part["function"]))
                else:
                    told["calls"][-1]["arguments"] += part["function"]["arguments"]
            reason = choice["finish_reason"] or reason
    return told, reason


def test_the_template_shows_both_formats(running: Running) -> None:
    parsers = running.server.chat_parsers
    assert (parsers.tool, parsers.reasoning) == (Gemma4Parser, STYLES["gemma4"])


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("thinks", [False, True])
def test_required_calls(running: Running, seed: int, thinks: bool) -> None:
    # A thought ends at once; in it, no call may begin.
    ends = {"logit_bias": {str(IDS["<channel|>"]): 100, str(IDS["<|tool_call>"]): 99}, **THINK} if thinks else {}
    asked = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 150, "seed": seed}
    choice = running.chat("How is the weather?", **asked, **ends)["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert not choice["message"]["content"]
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "weather"
    jsonschema_rs.validator_for(WEATHER).validate(json.loads(call["function"]["arguments"]))
    told, reason = streamed(running, **asked, **ends)
    assert (told["calls"], told["content"], reason) == ([call["function"]], "", "tool_calls")


def test_a_named_function(running: Running) -> None:
    named = {"type": "function", "function": {"name": "weather"}}
    choice = running.chat("Hi", tools=TOOLS, tool_choice=named, max_tokens=150, seed=4)["choices"][0]
    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["weather"]
    assert choice["finish_reason"] == "stop"


def test_reasoning_that_the_prompt_opened(running: Running) -> None:
    message = running.chat("Hi", max_tokens=8, seed=1, **THINK)["choices"][0]["message"]
    assert message["reasoning_content"]
    assert not message["content"]
    told, _ = streamed(running, max_tokens=8, seed=1, **THINK)
    assert told["reasoning_content"]
    assert not told["content"]
    message = running.chat("Hi", max_tokens=8, seed=1)["choices"][0]["message"]
    assert not message.get("reasoning_content")
    assert message["content"]


SCHEMA = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
ENDS = {"logit_bias": {str(IDS["<channel|>"]): 100}}


def test_markers_are_read_without_tools_and_never_told(running: Running) -> None:
    """They are special tokens, which decoding leaves out otherwise."""
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
    message = running.chat("Hi", max_tokens=20, response_format=form, **ENDS, **THINK)["choices"][0]["message"]
    assert json.loads(message["content"])["n"] in (1, 2)
    assert not message.get("reasoning_content")
    message = running.chat("Hi", max_tokens=3, **ENDS)["choices"][0]["message"]
    assert not message["content"]


def test_reasoning_tokens_are_counted(running: Running) -> None:
    form = {"type": "json_schema", "name": "n", "schema": SCHEMA}
    body = {"model": "tiny", "input": "Hi", **THINK}
    usage = running.client.post("/v1/responses", json={**body, "max_output_tokens": 20}).json()["usage"]
    assert usage["output_tokens_details"]["reasoning_tokens"] == usage["output_tokens"] == 20
    answer = running.client.post("/v1/responses", json={**body, "text": {"format": form}, **ENDS}).json()
    (item,) = answer["output"]
    assert json.loads(item["content"][0]["text"])["n"] in (1, 2)


def test_earlier_calls_are_shown_as_the_model_wrote_them(running: Running) -> None:
    arguments = {"city": 'a "b"', "days": [1, 2], "unit": "C", "more": {"yes": True}}
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": json.dumps(arguments)}}
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": None, "reasoning_content": "Ask.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
    ]
    body = {"model": "tiny", "messages": messages, "tools": TOOLS}
    ids = running.client.post("/tokenize", json=body).json()["tokens"]
    assert running.server.tokenizer.decode(ids, skip_special_tokens=False) == (
        "<|tool>declaration:weather<tool|><|turn>user\nHi<turn|>\n<|turn>model\n<|channel>thought\nAsk.\n<channel|>"
        '<|tool_call>call:weather{city:<|"|>a "b"<|"|>,days:[1,2],more:{yes:true},unit:<|"|>C<|"|>}<tool_call|>'
        '<|tool_response>response:call_1{value:<|"|>sunny<|"|>}<tool_response|>'
        "<|turn>model\n<|channel>thought\n<channel|>"
    )
    parser = Gemma4Parser({"weather"})
    text = '<|tool_call>call:weather{city:<|"|>a "b"<|"|>,days:[1,2],more:{yes:true},unit:<|"|>C<|"|>}<tool_call|>'
    told = "".join(part["function"]["arguments"] for delta in parser.push(text) for part in delta.tool_calls)
    assert json.loads(told) == arguments
