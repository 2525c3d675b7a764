"""Items of /v1/responses and messages of a chat: one is made of the other here."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from .as_chat import shown, text_parts, wrong

_TEXTS = ("input_text", "output_text", "text", "refusal")
_ROLES = ("user", "assistant", "system", "developer")
_PREFIXES = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}
_KINDS = "message, function_call, function_call_output or reasoning"


def new_item_id(kind: str) -> str:
    """An id for an item of that type."""
    return f"{_PREFIXES[kind]}_{uuid.uuid4().hex}"


def read_items(given: str | Sequence[Any]) -> list[dict[str, Any]]:
    """The input of a request as items, each with id and type. Raises ApiError for what is no item of a kind we know."""
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    items = []
    for index, item in enumerate(given):
        where = f"input.{index}"
        if not isinstance(item, Mapping):
            raise wrong(where, f"give an item, not {shown(item)}")
        kind = item.get("type", "message" if "role" in item else None)
        if not isinstance(kind, str) or kind not in _PREFIXES:
            raise wrong(f"{where}.type", f"{shown(kind)} is no item that is taken here: use {_KINDS}")
        read = {**item, "type": kind, "id": item.get("id") or new_item_id(kind)}
        if kind == "message" and isinstance(item.get("content"), str):
            part = "output_text" if item.get("role") == "assistant" else "input_text"
            read["content"] = [{"type": part, "text": item["content"]}]
        items.append(read)
    return items


def messages_of(items: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The conversation that items are. Raises ApiError.

    What the assistant says in one turn, its reasoning and its calls, is one message, as chat templates want it.
    """
    messages: list[dict[str, Any]] = []
    reasoning = ""
    for index, item in enumerate(items):
        where, kind = f"input.{index}", item["type"]
        if kind == "reasoning":
            reasoning = _reasoning(where, item)
            continue
        if kind == "function_call_output":
            call_id, output = _text(where, item, "call_id"), item.get("output")
            content = text_parts(f"{where}.output", output, _TEXTS)
            messages.append({"role": "tool", "tool_call_id": call_id, "content": content})
            reasoning = ""
            continue
        if kind == "message":
            role = item.get("role")
            if role not in _ROLES:
                raise wrong(f"{where}.role", f"{shown(role)} is no role: use {', '.join(_ROLES)}")
            message = {"role": role, "content": text_parts(f"{where}.content", item.get("content"), _TEXTS)}
            messages.append(message)
        else:
            new_turn = reasoning or not messages or messages[-1]["role"] != "assistant"
            if new_turn:
                messages.append({"role": "assistant", "content": ""})
            message = messages[-1]
            function = {"name": _text(where, item, "name"), "arguments": _text(where, item, "arguments")}
            call = {"id": _text(where, item, "call_id"), "type": "function", "function": function}
            message.setdefault("tool_calls", []).append(call)
        if reasoning and message["role"] == "assistant":
            message["reasoning_content"] = reasoning
        reasoning = ""
    return messages


def _reasoning(where: str, item: Mapping[str, Any]) -> str:
    parts = item.get("content") or []
    return text_parts(f"{where}.content", parts, ("reasoning_text", "text"))


def _text(where: str, item: Mapping[str, Any], name: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise wrong(f"{where}.{name}", f"{shown(value)} is no string: give it as the answer had it")
    return value
