"""Requests of Anthropic's /v1/messages."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, NotRequired

from pydantic import Field
from typing_extensions import TypedDict

from .as_chat import AskedAsChat, text_of
from .chat import ChatRequest, TemplateVariables
from .common import Stops
from .forms import MessagesSchemaForm
from .images import as_chat_image
from .message_blocks import BlockMessages, TextContent
from .shapes import shaped
from .tools import MessagesChoice, MessagesTools

_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


class ThinkingSwitch(TypedDict):
    """A budget has no effect: reasoning is not cut short."""

    type: NotRequired[Literal["enabled", "disabled", "adaptive"] | None]


class OutputConfig(TypedDict):
    effort: NotRequired[str | None]
    format: NotRequired[MessagesSchemaForm | None]


class MessagesRequest(AskedAsChat):
    """Blocks of text, image, tool_use, tool_result and thinking. An assistant's message at the end is continued."""

    messages: BlockMessages
    system: TextContent | None = None
    max_tokens: int | None = Field(None, ge=1, lt=2**31)
    stop_sequences: Stops = ()
    tools: MessagesTools | None = None
    tool_choice: MessagesChoice | None = None
    thinking: Annotated[dict[str, Any], shaped(ThinkingSwitch)] | None = None
    output_config: Annotated[dict[str, Any], shaped(OutputConfig)] | None = None
    chat_template_kwargs: TemplateVariables | None = None

    refused: ClassVar[Mapping[str, str]] = {
        **AskedAsChat.refused,
        "container": "nothing is run here: leave it out",
        "mcp_servers": "no servers are asked: run the tools yourself",
        "context_management": "contexts are not edited: leave it out",
        "response_format": "this API has another name for it: use output_config.format",
    }

    def chat(self) -> ChatRequest:
        """The equivalent chat request."""
        messages = [told for message in self.messages for told in _messages(message)]
        if self.system:
            messages.insert(0, {"role": "system", "content": text_of(self.system)})
        last = messages[-1]
        choice, parallel = _choice(self.tool_choice)
        config = self.output_config or {}
        return self.as_chat(
            messages,
            max_tokens=self.max_tokens,
            stop=self.stop_sequences or self.stop,
            tools=[_tool(tool) for tool in self.tools or ()],
            tool_choice=choice,
            parallel_tool_calls=parallel,
            response_format=_response_format(config.get("format")),
            reasoning_effort=config.get("effort"),
            continue_final_message=last["role"] == "assistant" and "tool_calls" not in last,
            chat_template_kwargs={**_thinking(self.thinking), **(self.chat_template_kwargs or {})} or None,
        )


def _messages(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One message as messages of a chat; each tool result becomes its own message."""
    role, content = message["role"], message["content"]
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    return _assistant(content) if role == "assistant" else _user(role, content)


def _user(role: str, blocks: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    results, parts = [], []
    for block in blocks:
        if block["type"] == "tool_result":
            text = text_of(block.get("content") or "")
            results.append({"role": "tool", "tool_call_id": block["tool_use_id"], "content": text})
        else:
            parts.append(as_chat_image(block) if block["type"] == "image" else block)
    content = parts if any(part["type"] != "text" for part in parts) else text_of(parts)
    return [*results, *([{"role": role, "content": content}] if parts else [])]


def _assistant(blocks: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    texts, thoughts, calls = [], [], []
    for block in blocks:
        if block["type"] == "tool_use":
            function = {"name": block["name"], "arguments": json.dumps(block["input"], ensure_ascii=False)}
            calls.append({"id": block["id"], "type": "function", "function": function})
        elif block["type"] == "thinking":
            thoughts.append(block["thinking"])
        elif block["type"] == "text":
            texts.append(block["text"])
    message: dict[str, Any] = {"role": "assistant", "content": "\n".join(texts)}
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return [message]


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    function = {name: tool[name] for name in ("name", "description", "strict") if tool.get(name) is not None}
    return {"type": "function", "function": {**function, "parameters": tool.get("input_schema")}}


def _choice(choice: Mapping[str, Any] | None) -> tuple[Any, bool | None]:
    """tool_choice and parallel_tool_calls of the equivalent chat."""
    if choice is None:
        return None, None
    parallel = False if choice.get("disable_parallel_tool_use") is True else None
    if choice["type"] == "tool":
        return {"type": "function", "function": {"name": choice["name"]}}, parallel
    return _CHOICES[choice["type"]], parallel


def _thinking(thinking: Mapping[str, Any] | None) -> dict[str, Any]:
    """Template variables, for models whose reasoning can be switched off."""
    kind = None if thinking is None else thinking.get("type")
    return {} if kind in (None, "adaptive") else {"enable_thinking": kind == "enabled"}


def _response_format(form: Mapping[str, Any] | None) -> dict[str, Any] | None:
    if form is None:
        return None
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": form["schema"]}}
