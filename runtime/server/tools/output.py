"""Parses an answer: reasoning first, then tool calls and content."""

from __future__ import annotations

from collections.abc import Sequence

from ..chat_output import ChatDelta
from ..text_machine import TextMachine
from .parser import ToolCallParser


class ChatOutputParser:
    """Separates reasoning, tool calls and content of one answer. None: the model does not do that.

    The result does not depend on how the text is cut into pieces. count_calls False: the client chose the function, so
    that the finish reason stays "stop".
    """

    def __init__(
        self, reasoning: TextMachine | None, tools: ToolCallParser | None, *, count_calls: bool = True
    ) -> None:
        self._reasoning = reasoning
        self._tools = tools
        self._count_calls = count_calls

    @property
    def called_tools(self) -> bool:
        """Whether a tool call was found; the finish reason "stop" then becomes "tool_calls"."""
        return self._count_calls and self._tools is not None and self._tools.num_calls > 0

    def push(self, text: str, token_ids: Sequence[int] = ()) -> list[ChatDelta]:
        """Takes the next piece of text; returns the deltas that are certain now."""
        if self._reasoning is None:
            return self._after([ChatDelta(content=text)] if text else [])
        return self._after(self._reasoning.push(text))

    def finish(self) -> list[ChatDelta]:
        """Returns the deltas that were held back; called once, after the last piece."""
        deltas = [] if self._reasoning is None else self._after(self._reasoning.finish())
        return deltas + ([] if self._tools is None else self._tools.finish())

    def _after(self, deltas: list[ChatDelta]) -> list[ChatDelta]:
        if self._tools is None:
            return deltas
        told: list[ChatDelta] = []
        for delta in deltas:
            told += self._tools.push(delta.content) if delta.content else [delta]
        return told
