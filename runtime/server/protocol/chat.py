"""Requests of /v1/chat/completions."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from .common import SamplingFields


class ChatRequest(SamplingFields):
    """max_completion_tokens is OpenAI's newer name of max_tokens and wins. chat_template_kwargs: what else the template
    reads. continue_final_message: the answer goes on where the last message ends."""

    messages: list[dict[str, Any]] = Field(min_length=1)
    max_tokens: int | None = Field(None, ge=1, lt=2**31)
    max_completion_tokens: int | None = Field(None, ge=1, lt=2**31)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None

    @property
    def num_logprobs(self) -> int | None:
        """Alternatives beside each token; None for no logprobs."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def asked_max_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
