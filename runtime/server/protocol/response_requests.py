"""Requests of /v1/responses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, NotRequired

from pydantic import Field
from typing_extensions import TypedDict

from .as_chat import AskedAsChat
from .chat import ChatRequest, TemplateVariables
from .forms import ResponseTextFormat
from .response_items import Input, messages_of
from .shapes import Items, shaped
from .tools import ResponseChoice, ResponseTools

LOGPROBS = "message.output_text.logprobs"
_TOOL_FIELDS = ("name", "description", "parameters", "strict")


class TextConfig(TypedDict):
    format: NotRequired[ResponseTextFormat | None]


class ReasoningConfig(TypedDict):
    effort: NotRequired[str | None]


class ResponseRequest(AskedAsChat):
    """text.format is what response_format is for a chat. include: message.output_text.logprobs tells logprobs; what
    else OpenAI knows has no effect. metadata and the like are told back."""

    input: Input
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1, lt=2**31)
    previous_response_id: str | None = None
    store: bool | None = None
    text: Annotated[dict[str, Any], shaped(TextConfig)] | None = None
    reasoning: Annotated[dict[str, Any], shaped(ReasoningConfig)] | None = None
    tools: ResponseTools | None = None
    tool_choice: ResponseChoice | None = None
    parallel_tool_calls: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    include: Items[str] | None = None
    metadata: dict[str, str] | None = Field(None, max_length=16)
    truncation: Literal["disabled"] | None = None
    chat_template_kwargs: TemplateVariables | None = None

    refused: ClassVar[Mapping[str, str]] = {
        **AskedAsChat.refused,
        "background": "answers are made while you wait: leave it out, and set stream",
        "conversation": "conversations are not kept: use previous_response_id",
        "prompt": "prompts are not kept here: give input and instructions",
        "context_management": "contexts are not compacted: leave it out",
        "response_format": "this API has another name for it: use text.format",
        "max_tokens": "this API has another name for it: use max_output_tokens",
        "messages": "this API has another name for it: use input",
    }

    @property
    def wants_logprobs(self) -> bool:
        return bool(self.top_logprobs) or LOGPROBS in (self.include or ())

    def chat(self, items: Sequence[Mapping[str, Any]]) -> ChatRequest:
        """The equivalent chat request. items: the conversation so far, including this request's input."""
        messages = messages_of(items)
        if self.instructions:
            messages.insert(0, {"role": "system", "content": self.instructions})
        return self.as_chat(
            messages,
            max_completion_tokens=self.max_output_tokens,
            logprobs=self.wants_logprobs,
            top_logprobs=self.top_logprobs,
            tools=[_tool(tool) for tool in self.tools or ()],
            tool_choice=_choice(self.tool_choice),
            parallel_tool_calls=self.parallel_tool_calls,
            response_format=_response_format((self.text or {}).get("format")),
            reasoning_effort=(self.reasoning or {}).get("effort"),
            chat_template_kwargs=self.chat_template_kwargs,
        )


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {name: tool[name] for name in _TOOL_FIELDS if tool.get(name) is not None}}


def _choice(choice: str | Mapping[str, Any] | None) -> Any:
    """tool_choice of the equivalent chat."""
    if not isinstance(choice, Mapping):
        return choice
    if choice["type"] == "function":
        return {"type": "function", "function": {"name": choice["name"]}}
    tools = [_choice(tool) for tool in choice["tools"]]
    return {"type": "allowed_tools", "allowed_tools": {"mode": choice["mode"], "tools": tools}}


def _response_format(form: Mapping[str, Any] | None) -> dict[str, Any] | None:
    if form is None or form["type"] != "json_schema":
        return None if form is None else dict(form)
    described = {name: form[name] for name in ("name", "schema", "strict") if form.get(name) is not None}
    return {"type": "json_schema", "json_schema": described}
