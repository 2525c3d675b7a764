"""Tools and tool_choice in the form of each API."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired

from pydantic import Field, StringConstraints, WithJsonSchema
from typing_extensions import TypedDict

from .shapes import Items, Rule, list_of, one_of, shaped, type_of

MAX_TOOLS = 128
_Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]


def _of_an_object(schema: dict[str, Any]) -> None:
    if schema.get("type", "object") != "object":
        raise ValueError("give the JSON schema of an object")


# A schema may omit that arguments are an object. The rest of it is validated when it is compiled.
_Parameters = Annotated[dict[str, Any], Rule(_of_an_object, {"properties": {"type": {"const": "object"}}})]


class ChatFunction(TypedDict):
    name: _Name
    description: NotRequired[str | None]
    parameters: NotRequired[_Parameters | None]
    strict: NotRequired[bool | None]


class ChatTool(TypedDict):
    type: NotRequired[Literal["function"] | None]
    function: ChatFunction


class ResponseTool(TypedDict):
    type: Literal["function"]
    name: _Name
    description: NotRequired[str | None]
    parameters: NotRequired[_Parameters | None]
    strict: NotRequired[bool | None]


class MessagesTool(TypedDict):
    type: NotRequired[Literal["custom"] | None]
    name: _Name
    description: NotRequired[str | None]
    input_schema: NotRequired[_Parameters | None]
    strict: NotRequired[bool | None]


def _tools(shape: Any, kind: str, default: str | None, example: str) -> Any:
    hint = f"only tools that the client runs are called: give {example}"
    tool = one_of(hint, lambda value: type_of(value, default), {kind: shape}, "unsupported_parameter")
    return shaped(list_of(tool, max_length=MAX_TOOLS))


_CHAT_TOOL = '{"type": "function", "function": {"name": …, "parameters": {…}}}'
_RESPONSE_TOOL = '{"type": "function", "name": …, "parameters": {…}}'
_MESSAGES_TOOL = '{"name": …, "input_schema": {…}}'
ChatTools = Annotated[list[dict[str, Any]], _tools(ChatTool, "function", "function", _CHAT_TOOL)]
ResponseTools = Annotated[list[dict[str, Any]], _tools(ResponseTool, "function", None, _RESPONSE_TOOL)]
MessagesTools = Annotated[list[dict[str, Any]], _tools(MessagesTool, "custom", "custom", _MESSAGES_TOOL)]


# Whether the tool exists is checked later: a schema cannot express it.
class Named(TypedDict):
    name: str


class ChosenFunction(TypedDict):
    type: Literal["function"]
    function: Named


class ChosenOfResponses(TypedDict):
    type: Literal["function"]
    name: str


_Mode = Literal["auto", "required"]


class Allowed(TypedDict):
    mode: _Mode
    tools: Annotated[Items[ChosenFunction], Field(min_length=1)]


class AllowedTools(TypedDict):
    type: Literal["allowed_tools"]
    allowed_tools: Allowed


class AllowedOfResponses(TypedDict):
    type: Literal["allowed_tools"]
    mode: _Mode
    tools: Annotated[Items[ChosenOfResponses], Field(min_length=1)]


class ChosenOfMessages(TypedDict):
    type: Literal["tool"]
    name: str
    disable_parallel_tool_use: NotRequired[bool | None]


class ChoiceOfMessages(TypedDict):
    type: Literal["auto", "any", "none"]
    disable_parallel_tool_use: NotRequired[bool | None]


_WORDS = ("none", "auto", "required")
_Word = Annotated[Literal["none", "auto", "required"], WithJsonSchema({"enum": list(_WORDS)})]


def _kind_of_choice(value: Any) -> str | None:
    return "word" if isinstance(value, str) and value in _WORDS else type_of(value)


def _choice(function: Any, allowed: Any, example: str) -> Any:
    hint = f"use none, auto, required or {example}"
    return shaped(one_of(hint, _kind_of_choice, {"word": _Word, "function": function, "allowed_tools": allowed}))


ChatChoice = Annotated[
    str | dict[str, Any], _choice(ChosenFunction, AllowedTools, '{"type": "function", "function": {"name": …}}')
]
ResponseChoice = Annotated[
    str | dict[str, Any], _choice(ChosenOfResponses, AllowedOfResponses, '{"type": "function", "name": …}')
]


def _kind_of_messages_choice(value: Any) -> str | None:
    kind = type_of(value)
    return "tool" if kind == "tool" else "word" if kind in ("auto", "any", "none") else None


MessagesChoice = Annotated[
    dict[str, Any],
    shaped(
        one_of(
            "use the type auto, any, none or tool",
            _kind_of_messages_choice,
            {"tool": ChosenOfMessages, "word": ChoiceOfMessages},
        )
    ),
]
