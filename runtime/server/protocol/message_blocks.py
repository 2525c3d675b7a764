"""Messages of Anthropic's API, made of blocks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, NotRequired

from typing_extensions import TypedDict

from .images import BlockImage
from .shapes import list_of, one_of, shaped, text_content, text_or_list, type_of


class SaidText(TypedDict):
    type: Literal["text"]
    text: str


TextContent = Annotated[str | list[dict[str, Any]], shaped(text_content(SaidText))]


class ToolResult(TypedDict):
    type: Literal["tool_result"]
    tool_use_id: str
    content: NotRequired[TextContent | None]


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
_USERS_BLOCK = one_of(
    f"{_TEXT}, or the type image", type_of, {"text": SaidText, "image": BlockImage, "tool_result": ToolResult}
)
_ASSISTANTS_BLOCK = one_of(
    _TEXT,
    type_of,
    {"text": SaidText, "tool_use": ToolUse, "thinking": Thinking, "redacted_thinking": RedactedThinking},
)


def _content(block: Any) -> Any:

    shapes = {"text": str, "list": list_of(block, min_length=1)}
    return shaped(one_of("give a string, or a non-empty list of blocks", text_or_list, shapes))


class UsersMessage(TypedDict):
    role: Literal["user", "system"]
    content: Annotated[Any, _content(_USERS_BLOCK)]


class AnswersMessage(TypedDict):
    role: Literal["assistant"]
    content: Annotated[Any, _content(_ASSISTANTS_BLOCK)]


def _kind_of(value: Any) -> str | None:
    role = value.get("role") if isinstance(value, Mapping) else None
    return "user" if role in ("user", "system") else "assistant" if role == "assistant" else None


_MESSAGE = one_of("use the role user or assistant", _kind_of, {"user": UsersMessage, "assistant": AnswersMessage})
BlockMessages = Annotated[list[dict[str, Any]], shaped(list_of(_MESSAGE, min_length=1))]
