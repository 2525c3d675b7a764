"""Rules of the OpenAPI document that no field's type tells: the served model's bounds, and what excludes what."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llmc.runtime.request_error import RequestError
from llmc.runtime.text.chat_template import ChatTemplateError
from llmc.runtime.text.tokenizer import Tokenizer

from .async_engine import AsyncEngine

_NULL = {"type": "null"}
_TEXT_PART = {
    "type": "object",
    "required": ["type", "text"],
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
}
_CONTENT = {"anyOf": [{"type": "string"}, {"type": "array", "items": _TEXT_PART}]}
# What an answer has, of which only the name is needed.
_CALL = {
    "type": "object",
    "required": ["function"],
    "properties": {
        "function": {"type": "object", "required": ["name"], "properties": {"name": {"type": "string"}}},
    },
}
_CALLS = {"type": "array", "items": _CALL}
_ROLES = ("system", "developer", "user", "assistant", "tool")
_CONSTRAINTS = (
    *("response_format", "structured_outputs"),
    *("guided_json", "guided_regex", "guided_choice", "guided_grammar"),
)


# Of Anthropic's API; blocks of thinking pass as well.
_TOOL_USE = {
    "type": "object",
    "required": ["type", "id", "name", "input"],
    "properties": {
        "type": {"const": "tool_use"},
        "id": {"type": "string"},
        "name": {"type": "string"},
        "input": {"type": "object"},
    },
}
_TOOL_RESULT = {
    "type": "object",
    "required": ["type", "tool_use_id"],
    "properties": {"type": {"const": "tool_result"}, "tool_use_id": {"type": "string"}, "content": {"type": "string"}},
}


def _object(**properties: Any) -> dict[str, Any]:
    """All of them are required, and more may be there."""
    return {"type": "object", "required": list(properties), "properties": properties}


_NAME = {"type": "string", "minLength": 1}
_MODE = {"enum": ["auto", "required"]}
_CHOICE_WORDS = {"enum": ["none", "auto", "required"]}
_FUNCTION = _object(type={"const": "function"}, function=_object(name=_NAME))
_RESPONSES_FUNCTION = _object(type={"const": "function"}, name=_NAME)


def _some(item: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "minItems": 1, "items": item}


# As each API has it; which tools there are no schema can say.
_TOOL_CHOICES = {
    "ChatRequest": [
        _CHOICE_WORDS,
        _FUNCTION,
        _object(type={"const": "allowed_tools"}, allowed_tools=_object(mode=_MODE, tools=_some(_FUNCTION))),
    ],
    "ResponseRequest": [
        _CHOICE_WORDS,
        _RESPONSES_FUNCTION,
        _object(type={"const": "allowed_tools"}, mode=_MODE, tools=_some(_RESPONSES_FUNCTION)),
    ],
    "MessagesRequest": [_object(type={"enum": ["auto", "any", "none"]}), _object(type={"const": "tool"}, name=_NAME)],
}


def _anthropics_message(roles: Sequence[str], blocks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    listed = {"type": "array", "minItems": 1, "items": {"anyOf": list(blocks)}}
    return {
        "type": "object",
        "required": ["role", "content"],
        "properties": {"role": {"enum": list(roles)}, "content": {"anyOf": [{"type": "string"}, listed]}},
    }


_ANTHROPICS_MESSAGE = {
    "anyOf": [
        _anthropics_message(["user", "system"], [_TEXT_PART, _TOOL_RESULT]),
        _anthropics_message(["assistant"], [_TEXT_PART, _TOOL_USE]),
    ]
}


def message_of(roles: Sequence[str]) -> dict[str, Any]:
    """A message as templates read it; it passes to the chat template as it is, with whatever else it has."""
    said = {
        "type": "object",
        "required": ["role", "content"],
        "properties": {"role": {"enum": [role for role in roles if role != "assistant"]}, "content": _CONTENT},
    }
    answered = {
        "type": "object",
        "required": ["role"],
        "properties": {
            "role": {"const": "assistant"},
            "content": {"anyOf": [*_CONTENT["anyOf"], _NULL]},
            "tool_calls": {"anyOf": [_CALLS, _NULL]},
        },
    }
    return {"anyOf": [said, answered] if "assistant" in roles else [said]}


def _roles(tokenizer: Tokenizer) -> list[str]:
    """Those that the model's chat template takes; all of them where it takes none so alone."""

    def takes(role: str) -> bool:
        try:
            tokenizer.apply_chat_template([{"role": "system" if role == "developer" else role, "content": "a"}])
        except (RequestError, ChatTemplateError):
            return False
        return True

    return [role for role in _ROLES if takes(role)] or list(_ROLES)


def add_rules(schemas: dict[str, Any], engine: AsyncEngine) -> None:
    """Writes them into the schemas of the requests, by name."""
    ids = {"type": "integer", "minimum": 0, "maximum": engine.vocab_size - 1}
    most = engine.max_model_len - 1
    tokenizer = engine.tokenizer
    message = message_of(_ROLES if tokenizer is None else _roles(tokenizer))
    for name in ("CompletionRequest", "ChatRequest", "MessagesRequest", "ResponseRequest"):
        schema = schemas[name]
        properties = schema["properties"]
        if name in _TOOL_CHOICES:
            properties["tool_choice"] = {"anyOf": [*_TOOL_CHOICES[name], _NULL], "title": "Tool Choice"}
        for field in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
            if field in properties:
                _number(properties[field]).update(maximum=most)
                _number(properties[field]).pop("exclusiveMaximum", None)
        _list(properties["stop_token_ids"])["items"] = ids
        _list(properties["guided_choice"])["minItems"] = 1
        for field in ("guided_grammar", "guided_regex"):
            next(one for one in properties[field]["anyOf"] if one.get("type") == "string")["minLength"] = 1
        _at_most_one(schema, _CONSTRAINTS)
        streams = {"required": ["stream"], "properties": {"stream": {"const": True}}}
        schema["allOf"] = [{"anyOf": [{"properties": {"stream_options": _NULL}}, streams]}]
    for form in schemas["CompletionRequest"]["properties"]["prompt"]["anyOf"]:
        inner = form.get("items", {})
        for listed in (form, inner):
            if listed.get("items", {}).get("type") == "integer":
                listed["items"] = ids
    schemas["CompletionRequest"]["oneOf"] = [
        {"properties": {"max_tokens": {"anyOf": [{"type": "integer", "minimum": 1}, _NULL]}}},
        {"required": ["max_tokens", "echo"], "properties": {"max_tokens": {"const": 0}, "echo": {"const": True}}},
    ]
    schemas["DetokenizeRequest"]["properties"]["tokens"]["items"] = ids
    schemas["ChatRequest"]["properties"]["messages"]["items"] = message
    schemas["MessagesRequest"]["properties"]["messages"]["items"] = _ANTHROPICS_MESSAGE
    tokenize = schemas["TokenizeRequest"]
    _list(tokenize["properties"]["messages"]).update(items=message, minItems=1)
    tokenize["oneOf"] = [
        {"required": ["prompt"], "properties": {"prompt": {"type": "string"}, "messages": _NULL}},
        {"required": ["messages"], "properties": {"messages": {"type": "array"}, "prompt": _NULL}},
    ]


def _number(schema: dict[str, Any]) -> dict[str, Any]:
    return next(one for one in schema["anyOf"] if one.get("type") == "integer")


def _list(schema: dict[str, Any]) -> dict[str, Any]:
    return next(one for one in schema["anyOf"] if one.get("type") == "array")


def _at_most_one(schema: dict[str, Any], fields: tuple[str, ...]) -> None:
    """Of `fields` all are null or absent but one."""
    schema["anyOf"] = [{"properties": {other: _NULL for other in fields if other != field}} for field in fields]
