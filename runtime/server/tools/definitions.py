"""Tools and tool_choice of a chat request, checked."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llmc.runtime.guided.constraint import Guided, schema_text
from llmc.runtime.guided.schema_defaults import SchemaDefaults
from llmc.runtime.request_error import RequestError

from ..errors import ApiError

MAX_TOOLS = 128
_JSON_SCHEMA = SchemaDefaults()
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


@dataclass(frozen=True)
class Tool:
    """A function that may be called. parameters: JSON text of its schema; strict: arguments must keep to it wholly."""

    name: str
    parameters: str
    strict: bool

    def schema_term(self) -> str:
        """The schema as a term of a Lark grammar. Raises RequestError."""
        return "%json " + schema_text(f"the schema of {self.name}", json.loads(self.parameters), strict=self.strict)

    def guided(self) -> tuple[str, Guided]:
        """The arguments alone, for messages."""
        return f"tool {self.name}", Guided.json_schema(json.loads(self.parameters), strict=self.strict)


@dataclass(frozen=True)
class ToolUse:
    """tools: those that may be called. required: one must be. named: the client chose it. parallel: several may be."""

    tools: tuple[Tool, ...]
    required: bool
    named: bool
    parallel: bool


def read_tools(
    tools: Sequence[Any] | None, choice: Any, parallel: bool | None, defaults: SchemaDefaults = _JSON_SCHEMA
) -> ToolUse | None:
    """The tools that a request may use, None when it may use none. defaults: of their schemas. Raises ApiError.

    Without tools a choice of them says nothing, as with OpenAI.
    """
    if not tools:
        _read_choice(choice)
        return None
    if len(tools) > MAX_TOOLS:
        raise _wrong("tools", f"there are {len(tools)} tools, at most {MAX_TOOLS} are taken: give fewer")
    known: dict[str, Tool] = {}
    for index, tool in enumerate(tools):
        read = _read_tool(f"tools[{index}]", tool, defaults)
        if read.name in known:
            raise _wrong("tools", f"two tools have the name {read.name!r}: rename one")
        known[read.name] = read
    required, names = _read_choice(choice)
    unknown = next((name for name in names or () if name not in known), None)
    if unknown is not None:
        raise _wrong("tool_choice", f"tool_choice names {unknown!r}, but the tools are {', '.join(known)}")
    if choice == "none":
        return None
    chosen = tuple(tool for name, tool in known.items() if names is None or name in names)
    named = isinstance(choice, Mapping) and choice.get("type") == "function"
    return ToolUse(chosen, required, named, parallel is not False and not named)


def _read_tool(where: str, tool: Any, defaults: SchemaDefaults) -> Tool:
    function = (
        tool.get("function") if isinstance(tool, Mapping) and tool.get("type", "function") == "function" else None
    )
    if not isinstance(function, Mapping):
        example = '{"type": "function", "function": {"name": …, "parameters": {…}}}'
        raise _wrong("tools", f"{where} is {_shown(tool)}: give {example}")
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        rule = "use 1 to 64 letters, digits, dots, dashes and underscores"
        raise _wrong("tools", f"{where} has the name {_shown(name)}: {rule}")
    parameters = function.get("parameters")
    if parameters is None:
        parameters = {"type": "object", "properties": {}, "additionalProperties": False}
    if not isinstance(parameters, Mapping) or parameters.get("type", "object") != "object":
        raise _wrong("tools", f"{where} has the parameters {_shown(parameters)}: give the JSON schema of an object")
    try:
        # The options are put in when a grammar is made of it.
        schema_text(f"the schema of {name}", parameters, strict=True)
    except RequestError as error:
        raise _wrong("tools", f"{where}: {error}") from error
    # A schema may leave open that arguments are an object.
    text = json.dumps(defaults.apply({"type": "object", **parameters}), ensure_ascii=False)
    return Tool(name, text, function.get("strict") is True)


def _read_choice(choice: Any) -> tuple[bool, tuple[str, ...] | None]:
    """(whether a tool must be called, the tools that may be; None: all)."""
    if choice is None or choice in ("auto", "none"):
        return False, None
    if choice == "required":
        return True, None
    if isinstance(choice, Mapping):
        if choice.get("type") == "function" and (name := _function_name(choice)) is not None:
            return True, (name,)
        allowed = choice.get("allowed_tools")
        if choice.get("type") == "allowed_tools" and isinstance(allowed, Mapping):
            listed = allowed.get("tools")
            names = [_function_name(tool) for tool in listed] if isinstance(listed, list) else []
            if names and None not in names and allowed.get("mode") in ("auto", "required"):
                return allowed["mode"] == "required", tuple(name for name in names if name is not None)
    example = '{"type": "function", "function": {"name": …}}'
    raise _wrong("tool_choice", f"tool_choice is {_shown(choice)}: use none, auto, required or {example}")


def _function_name(tool: Any) -> str | None:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    return name if isinstance(name, str) else None


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}…"


def _wrong(param: str, message: str) -> ApiError:
    return ApiError(message, param=param, code="invalid_value")
