"""Answers of /v1/responses and /v1/messages, for the OpenAPI document; the routes build such dictionaries."""

from __future__ import annotations

from typing import Any, Literal

from .responses import Answer, ChatToken, Count

Status = Literal["in_progress", "completed", "incomplete"]


class OutputText(Answer):
    type: Literal["output_text"]
    text: str
    annotations: list[None]
    logprobs: list[ChatToken]


class ReasoningText(Answer):
    type: Literal["reasoning_text"]
    text: str


class MessageItem(Answer):
    type: Literal["message"]
    id: str
    status: Status
    role: Literal["assistant"]
    content: list[OutputText]


class ReasoningItem(Answer):
    type: Literal["reasoning"]
    id: str
    status: Status
    summary: list[None]
    content: list[ReasoningText]


class FunctionCallItem(Answer):
    type: Literal["function_call"]
    id: str
    status: Status
    call_id: str
    name: str
    arguments: str


class InputTokensDetails(Answer):
    cached_tokens: Count
    cache_write_tokens: Literal[0]


class OutputTokensDetails(Answer):
    reasoning_tokens: Count


class ResponseUsage(Answer):
    input_tokens: Count
    input_tokens_details: InputTokensDetails
    output_tokens: Count
    output_tokens_details: OutputTokensDetails
    total_tokens: Count


class ResponseAnswer(Answer):
    """As OpenAI's; an answer that is kept is always complete or incomplete."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    background: Literal[False]
    error: dict[str, Any] | None
    incomplete_details: dict[str, Any] | None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    model: str
    output: list[MessageItem | ReasoningItem | FunctionCallItem]
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: dict[str, Any]
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: Count
    top_p: float
    truncation: Literal["disabled"]
    usage: ResponseUsage | None


class ResponseDeleted(Answer):
    id: str
    object: Literal["response"]
    deleted: Literal[True]


class InputItems(Answer):
    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


class TextBlock(Answer):
    type: Literal["text"]
    text: str


class ThinkingBlock(Answer):
    """signature: empty, as nothing here checks one."""

    type: Literal["thinking"]
    thinking: str
    signature: str


class ToolUseBlock(Answer):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class MessageUsage(Answer):
    input_tokens: Count
    cache_creation_input_tokens: Literal[0]
    cache_read_input_tokens: Count
    output_tokens: Count


class MessageAnswer(Answer):
    """As Anthropic's."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[TextBlock | ThinkingBlock | ToolUseBlock]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]
    stop_sequence: str | None
    usage: MessageUsage


class TokenCount(Answer):
    input_tokens: Count


class MessageErrorObject(Answer):
    type: str
    message: str
    code: str | None


class MessageErrorAnswer(Answer):
    """Every answer of /v1/messages that is not a success."""

    type: Literal["error"]
    error: MessageErrorObject
    request_id: str | None
