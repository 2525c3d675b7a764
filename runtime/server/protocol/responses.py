"""Answers of the endpoints, for the OpenAPI document; the routes build plain dictionaries of these shapes."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Count = Annotated[int, Field(ge=0)]
FinishReason = Literal["stop", "length", "tool_calls", "cancelled", "timeout", "error"]


class Answer(BaseModel):
    """Optional fields may be absent; nothing else appears."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())


class ErrorObject(Answer):
    """message: one sentence; param: the field at fault; code: a word for programs."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(Answer):
    """Every answer that is not a success."""

    error: ErrorObject


class PromptTokensDetails(Answer):
    cached_tokens: Count


class Usage(Answer):
    prompt_tokens: Count
    completion_tokens: Count
    total_tokens: Count
    prompt_tokens_details: PromptTokensDetails | None = None


class PromptToken(Answer):
    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptToken] | None]


class CompletionLogprobs(Answer):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class CompletionChoice(Answer):
    index: Count
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: str | int | None
    finish_detail: str | None = None
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: list[int] | None = None
    token_ids: list[int] | None = None


class CompletionAnswer(Answer):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage


class TopLogprob(Answer):
    token: str
    logprob: float
    bytes: list[int] | None


class ChatToken(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Answer):
    content: list[ChatToken] | None
    refusal: None = None


class FunctionCall(Answer):
    name: str
    arguments: str


class ToolCall(Answer):
    id: str
    type: Literal["function"]
    function: FunctionCall


class ChatMessage(Answer):
    role: Literal["assistant"]
    content: str | None
    refusal: None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None


class ChatChoice(Answer):
    index: Count
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    stop_reason: str | int | None
    finish_detail: str | None = None
    token_ids: list[int] | None = None


class ChatAnswer(Answer):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: list[int] | None = None


class Model(Answer):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int
    vocab_size: int
    artifact: str


class ModelList(Answer):
    object: Literal["list"]
    data: list[Model]


class TokenizeAnswer(Answer):
    count: Count
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeAnswer(Answer):
    prompt: str


class Health(Answer):
    status: Literal["ok", "failed"]
    error: str | None = None


class Readiness(Answer):
    status: Literal["starting", "ready", "draining", "failed"]
    graphs: dict[str, Any]
    error: str | None = None


class Versions(Answer):
    version: str
    native: str
