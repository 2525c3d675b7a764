"""Separates the reasoning of Gemma 4, <|channel>thought…<channel|>, from the answer.

Sources: the control tokens at https://ai.google.dev/gemma/docs/core/prompt-formatting-gemma4, common/parsers/gemma4.cpp
of llama.cpp, vllm/parser/gemma4.py of vLLM.
"""

from __future__ import annotations

from .text_machine import Step, TextMachine

OPEN, CLOSE, LABEL = "<|channel>", "<channel|>", "thought"
CALL, CALL_END = "<|tool_call>", "<tool_call|>"


class ThoughtParser(TextMachine):
    """Returns what stands in a channel as reasoning, all else as content, both without white space at the borders.

    inside: the text starts with reasoning, whether or not <|channel> is written. A thought may come anywhere but in a
    tool call, and a tool call ends one that is open. An end without beginning is dropped. Text without end of
    reasoning is all reasoning.
    """

    def __init__(self, inside: bool) -> None:
        self._inside = inside
        self._answered = False
        super().__init__()

    def _run(self) -> Step[None]:
        found = ""
        if self._inside:
            yield from self._space()
            opened = yield from self._literal(OPEN)
            found = yield from self._thought(labelled=opened)
        while found or (found := (yield from self._content_until(OPEN, CLOSE, CALL))):
            if found == CALL:
                yield from self._call()
                found = ""
                continue
            if self._answered:
                # White space between two parts of an answer.
                self._content(self._buffer[: self._position - len(found)])
            if found == OPEN:
                found = yield from self._thought(labelled=True)
            else:
                self._commit()
                found = ""

    def _thought(self, *, labelled: bool) -> Step[str]:
        """Reads a thought behind its marker; returns the marker that goes on with something else, nothing for its
        end. labelled: the label may come first."""
        start = self._position
        found = labelled and (yield from self._literal(LABEL, cut=True))
        if found and (yield from self._peek()) not in ("\n", CLOSE[0], ""):
            self._position = start  # words that only begin like the label
        yield from self._space()
        self._commit()
        marker = yield from self._until((OPEN, CLOSE, CALL), self._reasoning)
        if marker == CLOSE:
            yield from self._space()
            self._commit()
            return ""
        # Not part of either: white space before the marker or the end, or the start of a marker that was cut off.
        self._buffer = self._buffer[self._position - len(marker) :] if marker else ""
        self._position = len(marker)
        return marker

    def _call(self) -> Step[None]:
        """Emits a tool call as content, whatever its strings contain."""
        self._content(self._buffer[: self._position])
        self._commit()
        if (yield from self._content_until(CALL_END)):
            self._content(self._buffer[: self._position])
            self._commit()

    def _content(self, text: str) -> None:
        self._answered = self._answered or bool(text.strip())
        super()._content(text)
