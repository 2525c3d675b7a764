"""Converts items of /v1/responses to messages of a chat, and back."""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, NotRequired

from typing_extensions import TypedDict

from .as_chat import text_of
from .images import ResponseImage, as_chat_image
from .shapes import Text, list_of, one_of, shaped, text_content, text_or_list, type_of

_PREFIXES = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}
_KINDS = "message, function_call, function_call_output or reasoning"


class ItemText(TypedDict):
    type: Literal["input_text", "output_text", "text"]
    text: str


class ReasonedText(TypedDict):
    type: Literal["reasoning_text", "text"]
    text: str


_Content = Annotated[str | list[dict[str, Any]], shaped(text_content(ItemText, refusals=True))]
_Seen = Annotated[str | list[dict[str, Any]], shaped(text_content(ItemText, refusals=True, image=ResponseImage))]
_Reasoned = Annotated[str | list[dict[str, Any]], shaped(text_content(ReasonedText))]


class GivenMessage(TypedDict):
    id: NotRequired[str | None]
    type: NotRequired[Literal["message"] | None]
    role: Literal["user", "assistant", "system", "developer"]
    content: _Seen


class GivenCall(TypedDict):
    id: NotRequired[str | None]
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class GivenOutput(TypedDict):
    id: NotRequired[str | None]
    type: Literal["function_call_output"]
    call_id: str
    output: _Content


class GivenReasoning(TypedDict):
    id: NotRequired[str | None]
    type: Literal["reasoning"]
    content: NotRequired[_Reasoned | None]


_ITEM = one_of(
    f"this is not an item that is taken here: use {_KINDS}",
    lambda value: type_of(value, "message"),
    {
        "message": GivenMessage,
        "function_call": GivenCall,
        "function_call_output": GivenOutput,
        "reasoning": GivenReasoning,
    },
)
Input = Annotated[
    str | list[dict[str, Any]],
    shaped(
        one_of(
            "give a non-empty string, or a non-empty list of items",
            text_or_list,
            {"text": Text, "list": list_of(_ITEM, min_length=1)},
        )
    ),
]


def new_item_id(kind: str) -> str:
    """A new id for an item of a request."""
    return f"{_PREFIXES[kind]}_{uuid.uuid4().hex}"


def answer_item_id(kind: str, answer_id: str, index: int) -> str:
    """The id of an answer's item, the same wherever the answer is computed."""
    return f"{_PREFIXES[kind]}_{hashlib.sha256(f'{answer_id} {index}'.encode()).hexdigest()[:32]}"


def read_items(given: str | Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The input of a request as items, each with id and type."""
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    items = []
    for item in given:
        kind = item.get("type") or "message"
        read = {**item, "type": kind, "id": item.get("id") or new_item_id(kind)}
        if kind == "message" and isinstance(item["content"], str):
            part = "output_text" if item["role"] == "assistant" else "input_text"
            read["content"] = [{"type": part, "text": item["content"]}]
        items.append(read)
    return items


def _content_of(content: str | Sequence[Mapping[str, Any]]) -> str | list[dict[str, Any]]:
    """The content of a message of a chat: parts if it has images."""
    if isinstance(content, str) or all(part["type"] != "input_image" for part in content):
        return text_of(content)
    return [
        as_chat_image(part) if part["type"] == "input_image" else {"type": "text", "text": text_of([part])}
        for part in content
    ]


def messages_of(items: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The conversation that the items describe.

    Everything the assistant says in one turn, with its reasoning and calls, becomes one message, as chat templates
    expect.
    """
    messages: list[dict[str, Any]] = []
    reasoning = ""
    for item in items:
        kind = item["type"]
        if kind == "reasoning":
            reasoning = text_of(item.get("content") or "")
            continue
        if kind == "function_call_output":
            messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": text_of(item["output"])})
            reasoning = ""
            continue
        if kind == "message":
            message = {"role": item["role"], "content": _content_of(item["content"])}
            messages.append(message)
        else:
            new_turn = reasoning or not messages or messages[-1]["role"] != "assistant"
            if new_turn:
                messages.append({"role": "assistant", "content": ""})
            message = messages[-1]
            function = {"name": item["name"], "arguments": item["arguments"]}
            call = {"id": item["call_id"], "type": "function", "function": function}
            message.setdefault("tool_calls", []).append(call)
        if reasoning and message["role"] == "assistant":
            message["reasoning_content"] = reasoning
        reasoning = ""
    return messages
