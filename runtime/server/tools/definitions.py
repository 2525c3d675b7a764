"""Tools and tool_choice of a chat request, checked."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llmc.runtime.guided.constraint import Guided, schema_text
from llmc.runtime.guided.schema_defaults import SchemaDefaults
from llmc.runtime.request_error import RequestError

from ..errors import ApiError
from ..refusals import CONFLICT, CONSTRAINT

_JSON_SCHEMA = SchemaDefaults()


@dataclass(frozen=True)
class Tool:
    """A function that may be called. parameters: its schema as JSON text. strict: arguments must follow it
    completely."""

    name: str
    parameters: str
    strict: bool

    def schema_term(self) -> str:
        """The schema as a term of a Lark grammar. Raises RequestError."""
        return "%json " + schema_text(f"the schema of {self.name}", json.loads(self.parameters), strict=self.strict)

    def guided(self) -> tuple[str, Guided]:
        """(name for error messages, constraint on the arguments alone)."""
        return f"tool {self.name}", Guided.json_schema(json.loads(self.parameters), strict=self.strict)


@dataclass(frozen=True)
class ToolUse:
    """tools: the callable ones. required: at least one call. named: the client chose the function. parallel: allows
    several calls."""

    tools: tuple[Tool, ...]
    required: bool
    named: bool
    parallel: bool


def read_tools(
    tools: Sequence[Mapping[str, Any]] | None,
    choice: str | Mapping[str, Any] | None,
    parallel: bool | None,
    defaults: SchemaDefaults = _JSON_SCHEMA,
) -> ToolUse | None:
    """The tools that a request may use, None when it may use none; tools and choice as a ChatRequest has them.

    defaults: for their schemas. Raises ApiError.
    """
    required, names = _read_choice(choice)
    if not tools:
        if required:
            why = "tool_choice requires a call, and there are no tools: give tools, or leave tool_choice out"
            raise ApiError(why, param="tool_choice", code=CONFLICT)
        return None
    known: dict[str, Tool] = {}
    for index, tool in enumerate(tools):
        read = _read_tool(f"tools[{index}]", tool["function"], defaults)
        if read.name in known:
            raise ApiError(f"two tools have the name {read.name!r}: rename one", param="tools", code=CONFLICT)
        known[read.name] = read
    unknown = next((name for name in names or () if name not in known), None)
    if unknown is not None:
        why = f"tool_choice names {_shown(unknown)}, but the tools are {', '.join(known)}"
        raise ApiError(why, param="tool_choice", code=CONFLICT)
    if choice == "none":
        return None
    chosen = tuple(tool for name, tool in known.items() if names is None or name in names)
    named = isinstance(choice, Mapping) and choice["type"] == "function"
    return ToolUse(chosen, required, named, parallel is not False and not named)


def _read_tool(where: str, function: Mapping[str, Any], defaults: SchemaDefaults) -> Tool:
    name, parameters = function["name"], function.get("parameters")
    if parameters is None:
        parameters = {"type": "object", "properties": {}, "additionalProperties": False}
    try:
        # The options are added when a grammar is made from it.
        schema_text(f"the schema of {name}", parameters, strict=True)
    except RequestError as error:
        raise ApiError(f"{where}: {error}", param="tools", code=CONSTRAINT) from error
    # A schema may omit that arguments are an object.
    text = json.dumps(defaults.apply({"type": "object", **parameters}), ensure_ascii=False)
    return Tool(name, text, function.get("strict") is True)


def _read_choice(choice: str | Mapping[str, Any] | None) -> tuple[bool, tuple[str, ...] | None]:
    """(whether a tool must be called, the names of allowed tools; None: all)."""
    if not isinstance(choice, Mapping):
        return choice == "required", None
    if choice["type"] == "function":
        return True, (choice["function"]["name"],)
    allowed = choice["allowed_tools"]
    return allowed["mode"] == "required", tuple(tool["function"]["name"] for tool in allowed["tools"])


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}…"
