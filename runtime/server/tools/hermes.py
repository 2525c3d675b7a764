"""Tool calls as Hermes and Qwen write them: <tool_call>{"name": …, "arguments": {…}}</tool_call>."""

from __future__ import annotations

from collections.abc import Sequence

from llmc.runtime.text.tokenizer import Tokenizer

from ..text_machine import Step
from .definitions import Tool
from .parser import ToolCallParser, lead_rules, marker_term, one_of_tools

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"


class HermesParser(ToolCallParser):
    """Content and calls in any order; white space around calls is not content."""

    name = "hermes"
    markers = (_OPEN, _CLOSE)

    def _run(self) -> Step[None]:
        while (yield from self._content_until(_OPEN)):
            start = self._position
            yield from self._space()
            if not (yield from self._call()):
                # The marker is content; another one may follow it.
                self._position = start
                self._content(self._buffer[:start])
                self._commit()
                continue
            while True:
                yield from self._space()
                closed = yield from self._literal(_CLOSE, cut=True)
                yield from self._space()
                self._commit()
                if closed or not (yield from self._call()):
                    self._position = 0
                    break

    @classmethod
    def grammar(cls, tools: Sequence[Tool], parallel: bool, tokenizer: Tokenizer) -> str:
        start, end = marker_term(_OPEN, tokenizer), marker_term(_CLOSE, tokenizer)
        rules = [
            f"calls: {start} body" + (f' ("\\n" {start} body)*' if parallel else ""),
            "free: (lead body)* TEXT" if parallel else "free: TEXT | lead body",
            f'body: "\\n" call "\\n" {end}',
        ]
        return "\n".join([*rules, lead_rules(_OPEN, tokenizer) + one_of_tools(tools, "arguments")])
