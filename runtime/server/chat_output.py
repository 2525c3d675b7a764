"""What an assistant's text consists of: content, reasoning and tool calls, told apart while it streams."""

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
    """Takes the text of one continuation apart; made anew for each of them."""

    @property
    def called_tools(self) -> bool:
        """True once a tool call was found: the finish reason "stop" then becomes "tool_calls"."""

    def push(self, text: str, token_ids: Sequence[int]) -> Sequence[ChatDelta]:
        """Takes the next piece of text, never a part of a character, and returns what became certain."""

    def finish(self) -> Sequence[ChatDelta]:
        """Returns what was held back; called once, after the last piece."""
