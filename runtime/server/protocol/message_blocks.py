"""Messages of Anthropic's API, made of blocks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, NotRequired

from pydantic import Field
from typing_extensions import TypedDict

from .shapes import Items, one_of, shaped, text_content, type_of


class SaidText(TypedDict):
    type: Literal["text"]
    text: str


class ToolResult(TypedDict):
    type: Literal["tool_result"]
    tool_use_id: str
    content: NotRequired[text_content(SaidText) | None]  # type: ignore[valid-type]


class ToolUse(TypedDict):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class Thinking(TypedDict):
    type: Literal["thinking"]
    thinking: str


class RedactedThinking(TypedDict):
    type: Literal["redacted_thinking"]


_TEXT = 'models here read text: give {"type": "text", "text": …}'
_USERS_BLOCK = one_of(_TEXT, type_of, {"text": SaidText, "tool_result": ToolResult})
_ASSISTANTS_BLOCK = one_of(
    _TEXT,
    type_of,
    {"text": SaidText, "tool_use": ToolUse, "thinking": Thinking, "redacted_thinking": RedactedThinking},
)


def _content(block: Any) -> Any:
    blocks = Annotated[Items[block], Field(min_length=1)]  # type: ignore[valid-type]

    def kind_of(value: Any) -> str | None:
        return "text" if isinstance(value, str) else "blocks" if isinstance(value, list) else None

    return one_of("give a string, or a non-empty list of blocks", kind_of, {"text": str, "blocks": blocks})


class UsersMessage(TypedDict):
    role: Literal["user", "system"]
    content: _content(_USERS_BLOCK)  # type: ignore[valid-type]


class AnswersMessage(TypedDict):
    role: Literal["assistant"]
    content: _content(_ASSISTANTS_BLOCK)  # type: ignore[valid-type]


def _kind_of(value: Any) -> str | None:
    role = value.get("role") if isinstance(value, Mapping) else None
    return "user" if role in ("user", "system") else "assistant" if role == "assistant" else None


_MESSAGE = one_of("use the role user or assistant", _kind_of, {"user": UsersMessage, "assistant": AnswersMessage})
BlockMessages = Annotated[list[dict[str, Any]], shaped(Annotated[Items[_MESSAGE], Field(min_length=1)])]
System = Annotated[str | list[dict[str, Any]], shaped(text_content(SaidText))]
