"""Requests of other APIs that are answered like a chat: their common fields, and the conversion to a ChatRequest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from pydantic import Field

from .chat import ChatRequest
from .common import SamplingFields


class AskedAsChat(SamplingFields):
    """One answer to one conversation."""

    n: int | None = Field(None, ge=1, le=1)
    best_of: int | None = Field(None, ge=1, le=1)

    refused: ClassVar[Mapping[str, str]] = {
        **SamplingFields.refused,
        "use_beam_search": "beams are for other endpoints: use /v1/chat/completions",
        "prompt_logprobs": "prompts are not told back: use /v1/chat/completions",
        "return_token_ids": "token ids are not told: use /v1/chat/completions",
    }

    def as_chat(self, messages: Sequence[Mapping[str, Any]], **fields: Any) -> ChatRequest:
        """The equivalent chat request; all its fields are checked already or known to be valid."""
        shared = {name: getattr(self, name) for name in SamplingFields.model_fields}
        return ChatRequest.model_construct(**{**shared, "messages": messages, **fields})


def text_of(content: str | Sequence[Mapping[str, Any]]) -> str:
    """The text of a content: a string or a list of text parts."""
    if isinstance(content, str):
        return content
    return "\n".join(part["refusal"] if part["type"] == "refusal" else part["text"] for part in content)
