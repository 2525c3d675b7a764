"""Requests of /v1/responses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, Field, WithJsonSchema

from ..errors import ApiError
from .as_chat import AskedAsChat, shown, wrong
from .chat import ChatRequest
from .common import Items, Objects
from .response_items import messages_of

LOGPROBS = "message.output_text.logprobs"
_TOOL_FIELDS = ("name", "description", "parameters", "strict")


def _input(value: Any) -> Any:
    if not isinstance(value, (str, list)) or not value:
        raise ValueError("give a non-empty string, or a non-empty list of items")
    return value


_ITEM = {
    "type": "object",
    "properties": {
        "type": {"enum": ["message", "function_call", "function_call_output", "reasoning"]},
        "role": {"enum": ["user", "assistant", "system", "developer"]},
    },
}
Input = Annotated[
    Any,
    AfterValidator(_input),
    WithJsonSchema({"anyOf": [{"type": "string", "minLength": 1}, {"type": "array", "items": _ITEM, "minItems": 1}]}),
]


class ResponseRequest(AskedAsChat):
    """text.format is what response_format is for a chat. include: message.output_text.logprobs tells logprobs; what
    else OpenAI knows has no effect. metadata and the like are told back."""

    input: Input
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1, lt=2**31)
    previous_response_id: str | None = None
    store: bool | None = None
    text: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    tools: Objects | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    include: Items[str] | None = None
    metadata: dict[str, str] | None = Field(None, max_length=16)
    chat_template_kwargs: dict[str, Any] | None = None

    unsupported: ClassVar[Mapping[str, str]] = {
        "background": "answers are made while you wait: leave it out, and set stream",
        "conversation": "conversations are not kept: use previous_response_id",
        "prompt": "prompts are not kept here: give input and instructions",
        "context_management": "contexts are not compacted: leave it out",
        "response_format": "this API has another name for it: use text.format",
        "max_tokens": "this API has another name for it: use max_output_tokens",
        "messages": "this API has another name for it: use input",
    }

    def check(self) -> None:
        """Raises ApiError."""
        super().check()
        truncation = self._given("truncation")
        if truncation not in (None, "disabled"):
            why = f"truncation is {shown(truncation)}, but nothing is left out of a conversation: use disabled"
            raise ApiError(why, param="truncation", code="unsupported_parameter")

    @property
    def wants_logprobs(self) -> bool:
        return bool(self.top_logprobs) or LOGPROBS in (self.include or ())

    def chat(self, items: Sequence[Mapping[str, Any]]) -> ChatRequest:
        """The chat that is answered; items: the conversation so far, this request's input included. Raises ApiError."""
        messages = messages_of(items)
        if self.instructions:
            messages.insert(0, {"role": "system", "content": self.instructions})
        effort = (self.reasoning or {}).get("effort")
        return self.as_chat(
            messages,
            max_completion_tokens=self.max_output_tokens,
            logprobs=self.wants_logprobs,
            top_logprobs=self.top_logprobs,
            tools=[_tool(index, tool) for index, tool in enumerate(self.tools or ())],
            tool_choice=_choice(self.tool_choice),
            parallel_tool_calls=self.parallel_tool_calls,
            response_format=_response_format((self.text or {}).get("format")),
            reasoning_effort=effort if isinstance(effort, str) else None,
            chat_template_kwargs=self.chat_template_kwargs,
        )


def _tool(index: int, tool: Mapping[str, Any]) -> dict[str, Any]:
    if tool.get("type") != "function":
        why = f"tools.{index} has the type {shown(tool.get('type'))}: only functions, which the client runs, are called"
        raise ApiError(why, param="tools", code="unsupported_parameter")
    function = {name: tool[name] for name in _TOOL_FIELDS if tool.get(name) is not None}
    return {"type": "function", "function": function}


def _choice(choice: str | Mapping[str, Any] | None) -> Any:
    """tool_choice as a chat has it."""
    if not isinstance(choice, Mapping):
        return choice
    if choice.get("type") == "function":
        return {"type": "function", "function": {"name": choice.get("name")}}
    if choice.get("type") == "allowed_tools":
        listed = choice.get("tools")
        tools = [
            _choice(tool) if isinstance(tool, Mapping) else tool
            for tool in (listed if isinstance(listed, list) else ())
        ]
        return {"type": "allowed_tools", "allowed_tools": {"mode": choice.get("mode"), "tools": tools}}
    return dict(choice)


def _response_format(form: Any) -> dict[str, Any] | None:
    if form is None:
        return None
    if not isinstance(form, Mapping):
        raise wrong("text.format", f"{shown(form)} is no format: give an object with a type")
    if form.get("type") != "json_schema":
        return dict(form)
    described = {name: form[name] for name in ("name", "schema", "strict") if form.get(name) is not None}
    return {"type": "json_schema", "json_schema": described}
