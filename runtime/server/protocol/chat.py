"""Requests of /v1/chat/completions."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from ..errors import ApiError
from .common import Objects, SamplingFields


class ChatRequest(SamplingFields):
    """max_completion_tokens is OpenAI's newer name of max_tokens and wins. chat_template_kwargs: what else the template
    reads. continue_final_message: the answer goes on where the last message ends."""

    messages: Objects = Field(min_length=1)
    max_tokens: int | None = Field(None, ge=1, lt=2**31)
    max_completion_tokens: int | None = Field(None, ge=1, lt=2**31)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    tools: Objects | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None

    def check(self) -> None:
        """As for completions, and what excludes each other in a chat. Raises ApiError."""
        super().check()
        wrong: tuple[str, str] | None = None
        if self.top_logprobs and not self.logprobs:
            wrong = "top_logprobs", "top_logprobs needs logprobs: set logprobs to true"
        elif self.continue_final_message and self.add_generation_prompt:
            why = "continue_final_message and add_generation_prompt exclude each other: set one to false"
            wrong = "continue_final_message", why
        elif (self.model_extra or {}).get("echo"):
            wrong = "echo", "echo is not supported in a chat: use /v1/completions"
        if wrong is not None:
            raise ApiError(wrong[1], param=wrong[0], code="invalid_value")

    @property
    def num_logprobs(self) -> int | None:
        """Alternatives beside each token; None for no logprobs."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def asked_max_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
