"""Separates an assistant's text into content, reasoning and tool calls while it streams."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class ChatDelta:
    """A piece of the assistant's message. tool_calls: deltas as OpenAI streams them ({"index", "id", "function"})."""

    content: str = ""
    reasoning_content: str = ""
    tool_calls: tuple[dict[str, Any], ...] = ()


class ChatOutput(Protocol):
    """Parses the text of one continuation; created per continuation."""

    @property
    def called_tools(self) -> bool:
        """Whether a tool call was found: the finish reason "stop" then becomes "tool_calls"."""

    def push(self, text: str, token_ids: Sequence[int]) -> Sequence[ChatDelta]:
        """Takes the next piece of text, in whole characters; returns what became certain."""

    def finish(self) -> Sequence[ChatDelta]:
        """Returns the held-back rest; called once, after the last piece."""
