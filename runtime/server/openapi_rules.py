"""Rules of the OpenAPI document that depend on the served model: names, bounds, roles and tools."""

from __future__ import annotations

from typing import Any

from llmc.runtime.request_error import RequestError
from llmc.runtime.text.chat_template import ChatTemplateError
from llmc.runtime.text.tokenizer import Tokenizer

from .bounds import add_bounds
from .context import ServerContext
from .protocol.shapes import NULL

_ROLES = ("system", "developer", "user", "tool")


def add_rules(schemas: dict[str, Any], server: ServerContext) -> None:
    """Writes these rules into the request schemas, which are given by name."""
    add_bounds(schemas, server.engine)
    for name, schema in schemas.items():
        if name.endswith("Request"):
            schema["properties"]["model"] = {"enum": [*server.config.served_model_names, "", None]}
    if server.engine.tokenizer is not None:
        taken = _roles(server.engine.tokenizer)
        others = {"type": "string", "not": {"enum": [*taken, "assistant"]}}
        # Only the template can tell whether it accepts another role.
        schemas["SaidMessage"]["properties"]["role"] = {"anyOf": [{"enum": taken}, others]}
    if server.chat_parsers.tool is None:
        for name, forced in _FORCED.items():
            schemas[name]["allOf"].append(_tools_rule(forced))


def _roles(tokenizer: Tokenizer) -> list[str]:
    """Roles that the model's chat template accepts; all roles if it accepts none of them alone."""

    def takes(role: str) -> bool:
        try:
            tokenizer.apply_chat_template([{"role": "system" if role == "developer" else role, "content": "a"}])
        except (RequestError, ChatTemplateError):
            return False
        return True

    return [role for role in _ROLES if takes(role)] or list(_ROLES)


def _typed(*kinds: str, **properties: Any) -> dict[str, Any]:
    said = {"type": {"enum": list(kinds)}, **properties}
    return {"type": "object", "required": list(said), "properties": said}


_REQUIRED = {"const": "required"}
_ALLOWED = {"type": "object", "required": ["mode"], "properties": {"mode": _REQUIRED}}
# Values of tool_choice that force a call, per API.
_FORCED: dict[str, list[dict[str, Any]]] = {
    "ChatRequest": [
        {"enum": ["none", "required"]},
        _typed("function"),
        _typed("allowed_tools", allowed_tools=_ALLOWED),
    ],
    "ResponseRequest": [{"enum": ["none", "required"]}, _typed("function"), _typed("allowed_tools", mode=_REQUIRED)],
    "MessagesRequest": [_typed("none", "any", "tool")],
}


def _tools_rule(forced: list[dict[str, Any]]) -> dict[str, Any]:
    """Rule: optional tool calls need a call format that the model knows."""
    none = {"properties": {"tools": {"anyOf": [NULL, {"type": "array", "maxItems": 0}]}}}
    chosen = {"required": ["tool_choice"], "properties": {"tool_choice": {"anyOf": forced}}}
    return {"anyOf": [none, chosen]}
