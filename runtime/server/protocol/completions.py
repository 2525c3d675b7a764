"""Requests of /v1/completions, /tokenize and /detokenize."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, Field, WithJsonSchema

from ..errors import ApiError
from .api_model import ApiModel
from .chat import TemplateVariables
from .chat_messages import Messages
from .common import SamplingFields, is_token_ids
from .shapes import NULL, Items, Objects

MAX_PROMPTS = 1024


def _prompt(value: Any) -> Any:
    one = isinstance(value, str) or is_token_ids(value)
    batch = isinstance(value, list) and bool(value) and not one
    if not one and not (
        batch and (all(isinstance(item, str) for item in value) or all(is_token_ids(item) for item in value))
    ):
        raise ValueError("give a string, a list of token ids, or a non-empty list of one or the other")
    if batch and len(value) > MAX_PROMPTS:
        raise ValueError(f"{len(value)} prompts are too many for one request: give at most {MAX_PROMPTS}")
    return value


_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_BATCH = {"type": "array", "minItems": 1, "maxItems": MAX_PROMPTS}
Prompt = Annotated[
    Any,
    AfterValidator(_prompt),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                _IDS,
                {**_BATCH, "items": {"type": "string"}},
                {**_BATCH, "items": _IDS},
            ]
        }
    ),
]


class CompletionRequest(SamplingFields):
    """logprobs: alternatives beside each token. add_special_tokens: as the tokenizer does, for prompts of text."""

    prompt: Prompt
    max_tokens: int | None = Field(None, ge=0, lt=2**31)
    echo: bool | None = None
    logprobs: int | None = Field(None, ge=0, le=20)
    add_special_tokens: bool | None = None

    def check(self) -> None:
        """Checks the common fields, and that an answer without tokens is an echo. Raises ApiError."""
        super().check()
        if self.max_tokens == 0 and not self.echo:
            why = "max_tokens 0 is for echo only: ask for at least 1"
            raise ApiError(why, param="max_tokens", code="invalid_value")

    @classmethod
    def add_rules(cls, schema: dict[str, Any]) -> None:
        """As `check`."""
        super().add_rules(schema)
        echoes = {"required": ["echo"], "properties": {"echo": {"const": True}}}
        writes = {"properties": {"max_tokens": {"not": {"const": 0}}}}
        schema["allOf"].append({"anyOf": [writes, echoes]})

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts, each a text or token ids."""
        return [self.prompt] if isinstance(self.prompt, str) or is_token_ids(self.prompt) else list(self.prompt)


class TokenizeRequest(ApiModel):
    """A text, or a conversation; the latter's special tokens are written by the chat template."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    tools: Objects | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: TemplateVariables | None = None
    return_token_strs: bool | None = None

    def check(self) -> None:
        """Raises ApiError unless exactly one of both is given."""
        if (self.prompt is None) == (self.messages is None):
            raise ApiError("give either prompt or messages", param="prompt", code="invalid_value")

    @classmethod
    def add_rules(cls, schema: dict[str, Any]) -> None:
        """As `check`."""
        schema["oneOf"] = [
            {"required": ["prompt"], "properties": {"prompt": {"type": "string"}, "messages": NULL}},
            {"required": ["messages"], "properties": {"messages": {"type": "array"}, "prompt": NULL}},
        ]


class DetokenizeRequest(ApiModel):
    """Token ids to text."""

    model: str | None = None
    tokens: Items[int]
    skip_special_tokens: bool | None = None
