"""Requests of /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Field

from ..errors import ApiError
from .chat_messages import Messages
from .common import SamplingFields
from .shapes import Rule
from .tools import ChatChoice, ChatTools

_RESERVED = frozenset({"messages", "tools", "add_generation_prompt", "documents"})


def _unreserved(variables: dict[str, Any]) -> None:
    reserved = _RESERVED & variables.keys()
    if reserved:
        raise ValueError(f"{', '.join(sorted(reserved))} belongs to the chat: use the field of that name")


# Further variables of a chat template.
TemplateVariables = Annotated[
    dict[str, Any], Rule(_unreserved, {"propertyNames": {"not": {"enum": sorted(_RESERVED)}}})
]


class ChatRequest(SamplingFields):
    """max_completion_tokens is OpenAI's newer name of max_tokens and wins. chat_template_kwargs: what else the template
    reads. continue_final_message: the answer goes on where the last message ends."""

    messages: Messages
    max_tokens: int | None = Field(None, ge=1, lt=2**31)
    max_completion_tokens: int | None = Field(None, ge=1, lt=2**31)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    tools: ChatTools | None = None
    tool_choice: ChatChoice | None = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    chat_template_kwargs: TemplateVariables | None = None
    reasoning_effort: str | None = None

    refused: ClassVar[Mapping[str, str]] = {
        **SamplingFields.refused,
        "echo": "prompts are not told back in a chat: use /v1/completions",
    }

    def check(self) -> None:
        """As for completions, and what excludes each other in a chat. Raises ApiError."""
        super().check()
        wrong: tuple[str, str] | None = None
        if self.top_logprobs and not self.logprobs:
            wrong = "top_logprobs", "top_logprobs needs logprobs: set logprobs to true"
        elif self.continue_final_message and self.add_generation_prompt:
            why = "continue_final_message and add_generation_prompt exclude each other: set one to false"
            wrong = "continue_final_message", why
        if wrong is not None:
            raise ApiError(wrong[1], param=wrong[0], code="invalid_value")

    @classmethod
    def add_rules(cls, schema: dict[str, Any]) -> None:
        """As `check`."""
        super().add_rules(schema)
        told = {"required": ["logprobs"], "properties": {"logprobs": {"const": True}}}
        exclusive = ("continue_final_message", "add_generation_prompt")
        schema["allOf"] += [
            {"anyOf": [{"properties": {"top_logprobs": {"enum": [None, 0]}}}, told]},
            {"anyOf": [{"properties": {name: {"enum": [None, False]}}} for name in exclusive]},
        ]

    @property
    def num_logprobs(self) -> int | None:
        """Number of alternatives beside each token; None: no logprobs."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def asked_max_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
