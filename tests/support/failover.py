"""Requests of every kind that a router must be able to continue elsewhere, and what their streams add up to."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

_PROMPT = "It is a truth universally acknowledged, that"
_CITY = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 12}}, "required": ["city"]}
_TOOLS = [{"type": "function", "function": {"name": name, "parameters": _CITY}} for name in ("weather", "map")]
_COMMENT = re.compile(r": llmc (head|\d+ .*)\n\n")


def _chat(**body: Any) -> tuple[str, dict[str, Any]]:
    return "/v1/chat/completions", {"messages": [{"role": "user", "content": "Say more."}], "max_tokens": 24, **body}


def _completion(**body: Any) -> tuple[str, dict[str, Any]]:
    return "/v1/completions", {"prompt": _PROMPT, "max_tokens": 24, **body}


def _message(**body: Any) -> tuple[str, dict[str, Any]]:
    return "/v1/messages", {"messages": [{"role": "user", "content": "Say more."}], "max_tokens": 24, **body}


def _response(**body: Any) -> tuple[str, dict[str, Any]]:
    return "/v1/responses", {"input": "Say more.", "max_output_tokens": 24, **body}


_SCHEMA = {**_CITY, "additionalProperties": False}
_OBJECT = {"type": "json_schema", "json_schema": {"name": "city", "schema": _SCHEMA}}
_THOUGHT = "<think>[a-z ]{5,20}</think>[a-z ]{5,30}"
STREAMS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "greedy": _completion(temperature=0),
    "seeded": _completion(seed=7, temperature=1.2, top_p=0.95),
    "without a seed": _completion(temperature=1.0),
    "penalties": _completion(seed=3, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.4),
    "min_tokens": _completion(seed=4, min_tokens=12, stop=["e", "a"]),
    "stop strings": _completion(seed=11, max_tokens=60, stop=["ing the", "th"], include_stop_str_in_output=True),
    "logprobs": _completion(seed=5, logprobs=3, echo=True, max_tokens=12),
    "prompt_logprobs": _completion(seed=5, prompt_logprobs=2, max_tokens=8, n=2),
    "batch": _completion(prompt=[_PROMPT, "The sea", _PROMPT], seed=None, n=2, max_tokens=10),
    "chat": _chat(seed=1, stream_options={"include_usage": True}),
    "chat logprobs": _chat(seed=2, logprobs=True, top_logprobs=2, return_token_ids=True, max_tokens=12),
    "n": _chat(seed=6, n=3, temperature=1.3),
    "json": _chat(seed=8, response_format=_OBJECT, max_tokens=60),
    "tools": _chat(seed=10, tools=_TOOLS, tool_choice="required", max_tokens=80),
    "reasoning": _chat(seed=12, guided_regex=_THOUGHT, max_tokens=60),
    "message": _message(seed=13, stop_sequences=["zz"]),
    "message json": _message(
        seed=14, max_tokens=60, output_config={"format": {"type": "json_schema", "schema": _SCHEMA}}
    ),
    "message tools": _message(
        seed=15, tool_choice={"type": "any"}, max_tokens=80,
        tools=[{"name": name, "input_schema": _CITY} for name in ("weather", "map")],
    ),
    "message reasoning": _message(seed=16, guided_regex=_THOUGHT, max_tokens=60),
    "response": _response(),
    "response json": _response(seed=17, max_output_tokens=60,
                               text={"format": {"type": "json_schema", "name": "city", "schema": _SCHEMA}}),
    "response tools": _response(
        seed=18, tool_choice="required", max_output_tokens=80,
        tools=[{"type": "function", "name": name, "parameters": _CITY} for name in ("weather", "map")],
    ),
    "response logprobs": _response(
        seed=19, guided_regex=_THOUGHT, max_output_tokens=60, top_logprobs=2, include=["message.output_text.logprobs"]
    ),
}  # fmt: skip
"""Path and body of each, for a server that has the parsers hermes and qwen3."""
NAMED = ("/v1/messages", "/v1/responses")
"""Paths of APIs whose events have names, and whose streams end without [DONE]."""


def groups(text: str) -> list[tuple[str, str]]:
    """A stream with comments as (events, comment behind them); the last has no comment."""
    parts = _COMMENT.split(text)
    return [*zip(parts[0::2], parts[1::2], strict=False), (parts[-1], "")]


def sent_of(comments: Iterable[str], num_choices: int) -> list[dict[str, Any]]:
    """What comments say that was told."""
    sent: list[dict[str, Any]] = [{"token_ids": [], "ended": False} for _ in range(num_choices)]
    for comment in comments:
        if comment != "head":
            choice, ids, *end = comment.split(" ")
            sent[int(choice)]["token_ids"] += [int(token_id) for token_id in ids.split(",") if token_id]
            sent[int(choice)]["ended"] |= end == ["end"]
    return sent


def folded(text: str) -> dict[str, Any]:
    """What the events of a whole stream add up to, but for what may differ: cached tokens, the cuts between events."""
    if text.startswith("event: "):
        return {"choices": {0: _folded_events(text)}}
    events = [line.removeprefix("data: ") for line in text.split("\n\n") if line and not line.startswith(":")]
    assert events[-1] == "[DONE]", text[-500:]
    whole: dict[str, Any] = {"choices": {}}
    for event in map(json.loads, events[:-1]):
        assert "error" not in event, event
        for name in ("id", "object", "created", "model"):
            assert whole.setdefault(name, event[name]) == event[name]
        if event.get("usage"):
            whole["usage"] = {**event["usage"], "prompt_tokens_details": None}
        for name in ("prompt_token_ids", "prompt_logprobs"):
            if name in event:
                assert name not in whole
                whole[name] = event[name]
        for choice in event["choices"]:
            _fold_choice(whole["choices"].setdefault(choice["index"], {}), choice)
    return whole


def answer_of(text: str) -> dict[str, Any]:
    """The same of an answer that did not stream."""
    answer: dict[str, Any] = json.loads(text)
    assert answer.get("error") is None, answer
    if "object" in answer and answer["object"] != "response":
        answer["usage"]["prompt_tokens_details"] = None
    else:
        _uncache(answer["usage"])
    return answer


def _folded_events(text: str) -> list[dict[str, Any]]:
    """Events with names; neighbours that continue one text are one. Numbers must have no gap."""
    found: list[dict[str, Any]] = []
    told = [part for part in text.split("\n\n") if part and not part.startswith(":")]
    for number, (name, data) in enumerate(part.split("\n") for part in told):
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        assert event.pop("sequence_number", number) == number
        assert event["type"] not in ("error", "response.failed"), event
        for holder in (event, event.get("response") or {}):
            _uncache(holder.get("usage") or {})
        last = found[-1] if found else {}
        if "delta" in event and _apart(event) == _apart(last) and event["type"] != "message_delta":
            last["logprobs"] = [*last.get("logprobs", ()), *event.get("logprobs", ())]
            last["delta"] = _joined(last["delta"], event["delta"])
        else:
            found.append(event)
    return found


def _apart(event: Mapping[str, Any]) -> dict[str, Any]:
    """What must be equal in events that continue one text."""
    kind = event.get("delta")
    kind = kind["type"] if isinstance(kind, dict) and "type" in kind else None
    return {**{name: value for name, value in event.items() if name not in ("delta", "logprobs")}, "of": kind}


def _joined(first: Any, second: Any) -> Any:
    if isinstance(first, str):
        return first + second
    return {name: text if name == "type" else text + second[name] for name, text in first.items()}


def _uncache(usage: dict[str, Any]) -> None:
    """Hides how many tokens were cached."""
    if "cache_read_input_tokens" in usage:
        usage["input_tokens"] += usage["cache_read_input_tokens"]
        usage["cache_read_input_tokens"] = None
    usage.pop("input_tokens_details", None)


def _fold_choice(whole: dict[str, Any], choice: Mapping[str, Any]) -> None:
    assert "finish_reason" not in whole, "an event behind the end of its choice"
    delta = choice.get("delta", {})
    for name, text in (("text", choice.get("text")), *((name, delta.get(name)) for name in _TEXTS)):
        if text is not None:
            whole[name] = whole.get(name, "") + text
    if "role" in delta:
        whole["roles"] = whole.get("roles", 0) + 1
    for call in delta.get("tool_calls", ()):
        kept = whole.setdefault("tool_calls", {}).setdefault(call["index"], {"id": call.get("id"), "text": ""})
        assert call.get("id") in (None, kept["id"])
        kept["name"] = kept.get("name") or call["function"].get("name")
        kept["text"] += call["function"].get("arguments", "")
    for name, values in (choice.get("logprobs") or {}).items():
        if values is not None:
            whole.setdefault("logprobs", {}).setdefault(name, []).extend(values)
    for name in ("token_ids", "prompt_token_ids", "prompt_logprobs"):
        if choice.get(name) is not None:
            whole.setdefault(name, []).extend(choice[name])
    if choice.get("finish_reason") is not None:
        whole["finish_reason"], whole["stop_reason"] = choice["finish_reason"], choice["stop_reason"]


_TEXTS = ("content", "reasoning_content")
