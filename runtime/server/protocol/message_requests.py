"""Requests of Anthropic's /v1/messages."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from pydantic import Field

from ..errors import ApiError
from .as_chat import AskedAsChat, shown, text_parts, wrong
from .chat import ChatRequest
from .common import Objects, Stops

_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


class MessagesRequest(AskedAsChat):
    """Blocks of text, tool_use, tool_result and thinking. An assistant's message at the end is continued."""

    messages: Objects = Field(min_length=1)
    system: str | Objects | None = None
    max_tokens: int | None = Field(None, ge=1, lt=2**31)
    stop_sequences: Stops = ()
    tools: Objects | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    unsupported: ClassVar[Mapping[str, str]] = {
        "container": "nothing is run here: leave it out",
        "mcp_servers": "no servers are asked: run the tools yourself",
        "context_management": "contexts are not edited: leave it out",
        "response_format": "this API has another name for it: use output_config.format",
    }

    def chat(self) -> ChatRequest:
        """The chat that is answered. Raises ApiError."""
        messages = [told for index, message in enumerate(self.messages) for told in _messages(index, message)]
        if self.system:
            messages.insert(0, {"role": "system", "content": text_parts("system", self.system, ("text",))})
        last = messages[-1]
        choice, parallel = _choice(self.tool_choice)
        config = self.output_config or {}
        effort = config.get("effort")
        return self.as_chat(
            messages,
            max_tokens=self.max_tokens,
            stop=self.stop_sequences or self.stop,
            tools=[_tool(index, tool) for index, tool in enumerate(self.tools or ())],
            tool_choice=choice,
            parallel_tool_calls=parallel,
            response_format=_response_format(config.get("format")),
            reasoning_effort=effort if isinstance(effort, str) else None,
            continue_final_message=last["role"] == "assistant" and "tool_calls" not in last,
            chat_template_kwargs={**_thinking(self.thinking), **(self.chat_template_kwargs or {})} or None,
        )


def _messages(index: int, message: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The messages of a chat that one of these is: each result of a tool is one of its own."""
    where, role, content = f"messages.{index}", message.get("role"), message.get("content")
    if role not in ("user", "assistant", "system"):
        raise wrong(f"{where}.role", f"{shown(role)} is no role: use user or assistant")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    if not isinstance(content, list) or not content:
        raise wrong(f"{where}.content", "give a string, or a non-empty list of blocks")
    return _assistant(where, content) if role == "assistant" else _user(where, str(role), content)


def _user(where: str, role: str, blocks: Sequence[Any]) -> list[dict[str, Any]]:
    results, texts = [], []
    for number, block in enumerate(blocks):
        place = f"{where}.content.{number}"
        if isinstance(block, Mapping) and block.get("type") == "tool_result":
            output = block.get("content")
            text = "" if output is None else text_parts(f"{place}.content", output, ("text",))
            results.append({"role": "tool", "tool_call_id": _text(place, block, "tool_use_id"), "content": text})
        else:
            texts.append(text_parts(place, [block], ("text",)))
    return [*results, *([{"role": role, "content": "\n".join(texts)}] if texts else [])]


def _assistant(where: str, blocks: Sequence[Any]) -> list[dict[str, Any]]:
    texts, thoughts, calls = [], [], []
    for number, block in enumerate(blocks):
        place = f"{where}.content.{number}"
        kind = block.get("type") if isinstance(block, Mapping) else None
        if kind == "tool_use":
            arguments = block.get("input")
            if not isinstance(arguments, Mapping):
                raise wrong(f"{place}.input", f"{shown(arguments)} is no object: give it as the answer had it")
            function = {"name": _text(place, block, "name"), "arguments": json.dumps(arguments, ensure_ascii=False)}
            calls.append({"id": _text(place, block, "id"), "type": "function", "function": function})
        elif kind == "thinking":
            thoughts.append(_text(place, block, "thinking"))
        elif kind != "redacted_thinking":
            texts.append(text_parts(place, [block], ("text",)))
    message: dict[str, Any] = {"role": "assistant", "content": "\n".join(texts)}
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return [message]


def _tool(index: int, tool: Mapping[str, Any]) -> dict[str, Any]:
    if tool.get("type") not in (None, "custom"):
        why = f"tools.{index} has the type {shown(tool['type'])}: only tools that the client runs are called"
        raise ApiError(why, param="tools", code="unsupported_parameter")
    function = {name: tool[name] for name in ("name", "description", "strict") if tool.get(name) is not None}
    return {"type": "function", "function": {**function, "parameters": tool.get("input_schema")}}


def _choice(choice: Mapping[str, Any] | None) -> tuple[Any, bool | None]:
    """tool_choice and parallel_tool_calls as a chat has them."""
    if choice is None:
        return None, None
    parallel = False if choice.get("disable_parallel_tool_use") is True else None
    kind = choice.get("type")
    if kind == "tool":
        return {"type": "function", "function": {"name": _text("tool_choice", choice, "name")}}, parallel
    if not isinstance(kind, str) or kind not in _CHOICES:
        raise wrong("tool_choice.type", f"{shown(kind)} is no choice: use auto, any, none or tool")
    return _CHOICES[kind], parallel


def _thinking(thinking: Mapping[str, Any] | None) -> dict[str, Any]:
    """What templates of models that can leave it read. A budget has no effect: reasoning is not cut short."""
    kind = None if thinking is None else thinking.get("type")
    if kind in (None, "adaptive"):
        return {}
    if kind not in ("enabled", "disabled"):
        raise wrong("thinking.type", f"{shown(kind)} is no kind of thinking: use enabled, disabled or adaptive")
    return {"enable_thinking": kind == "enabled"}


def _response_format(form: Any) -> dict[str, Any] | None:
    if form is None:
        return None
    if (
        not isinstance(form, Mapping)
        or form.get("type") != "json_schema"
        or not isinstance(form.get("schema"), Mapping)
    ):
        raise wrong("output_config.format", 'this is no format: give {"type": "json_schema", "schema": {…}}')
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": form["schema"]}}


def _text(where: str, block: Mapping[str, Any], name: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise wrong(f"{where}.{name}", f"{shown(value)} is no string: give it as the answer had it")
    return value
