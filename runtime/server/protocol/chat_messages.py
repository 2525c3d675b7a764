"""Messages of a chat in requests; the chat template gets each message whole, including unknown fields."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, NotRequired

from pydantic import WithJsonSchema
from typing_extensions import TypedDict

from .images import ChatImage
from .shapes import Items, list_of, one_of, shaped, text_content

_Content = Annotated[str | list[dict[str, Any]], shaped(text_content(refusals=True))]
_Seen = Annotated[str | list[dict[str, Any]], shaped(text_content(refusals=True, image=ChatImage))]


class CalledFunction(TypedDict):
    """arguments: JSON text, or what it says."""

    name: str
    arguments: NotRequired[Any]


class Call(TypedDict):
    """As an answer had it."""

    function: CalledFunction


class SaidMessage(TypedDict):
    """role: whatever the chat template knows."""

    role: Annotated[str, WithJsonSchema({"type": "string", "not": {"const": "assistant"}})]
    content: _Seen
    tool_calls: NotRequired[Items[Call] | None]


class AssistantsMessage(TypedDict):
    role: Literal["assistant"]
    content: NotRequired[_Content | None]
    tool_calls: NotRequired[Items[Call] | None]


def _kind_of(value: Any) -> str | None:
    role = value.get("role") if isinstance(value, Mapping) else None
    return None if not isinstance(role, str) else "assistant" if role == "assistant" else "said"


_MESSAGE = one_of(
    "give an object with role and content", _kind_of, {"said": SaidMessage, "assistant": AssistantsMessage}
)
Messages = Annotated[list[dict[str, Any]], shaped(list_of(_MESSAGE, min_length=1))]
