"""Requests of other APIs that are answered as a chat is: their common fields, and the way to a ChatRequest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from ..errors import ApiError
from .chat import ChatRequest
from .common import SamplingFields

_OFF: tuple[Any, ...] = (None, False, "", [], {})


class AskedAsChat(SamplingFields):
    """One answer to one conversation. Subclasses say in `unsupported` what they cannot do, by field."""

    unsupported: ClassVar[Mapping[str, str]] = {}
    _never: ClassVar[Mapping[str, str]] = {
        "prompt_logprobs": "prompts are not told back: use /v1/chat/completions",
        "return_token_ids": "token ids are not told: use /v1/chat/completions",
    }

    def check(self) -> None:
        """As for a chat, and what this API cannot do. Raises ApiError."""
        super().check()
        for name, why in {**self._never, **self.unsupported}.items():
            if self._given(name) not in _OFF:
                raise ApiError(f"{name} is not supported, {why}", param=name, code="unsupported_parameter")
        if self.num_outputs > 1:
            why = "n is above 1, but this API gives one answer: use /v1/chat/completions"
            raise ApiError(why, param="n", code="unsupported_parameter")

    def as_chat(self, messages: Sequence[Mapping[str, Any]], **fields: Any) -> ChatRequest:
        """The chat that is answered; all of its fields are checked already, or known to be right."""
        shared = {name: getattr(self, name) for name in SamplingFields.model_fields}
        return ChatRequest.model_construct(**{**shared, "messages": messages, **fields})

    def _given(self, name: str) -> Any:
        return getattr(self, name, None) if name in type(self).model_fields else (self.model_extra or {}).get(name)


def text_parts(where: str, content: Any, kinds: Sequence[str]) -> str:
    """The text of a content that is a string or a list of parts; `kinds`: types of parts that hold text.

    where: the content's place in the request. Raises ApiError.
    """
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise wrong(where, f"give a string, or a list of parts of the type {kinds[0]}")
    texts = []
    for number, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        text = part.get("refusal" if kind == "refusal" else "text") if kind in kinds else None
        if not isinstance(text, str):
            raise wrong(f"{where}.{number}", f"models here read text, not {shown(kind)}: give parts of type {kinds[0]}")
        texts.append(text)
    return "\n".join(texts)


def wrong(where: str, why: str) -> ApiError:
    """What to say of a value that cannot be taken."""
    return ApiError(f"{where}: {why}", param=where, code="invalid_value")


def shown(value: Any) -> str:
    """A value of a request for a message."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
