"""Tool calls as Mistral writes them: [TOOL_CALLS] [{"name": …, "arguments": {…}}, …] or [TOOL_CALLS]name[ARGS]{…}."""

from __future__ import annotations

import json
from collections.abc import Sequence

from llmc.runtime.text.tokenizer import Tokenizer

from ..text_machine import Step
from .definitions import Tool
from .parser import ToolCallParser, lead_rules, marker_term, one_of_tools

_CALLS, _ARGS, _ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"


class MistralParser(ToolCallParser):
    """Older tokenizers use the list; those with an [ARGS] token write the name first."""

    name = "mistral"
    markers = (_CALLS, _ARGS, _ID)

    def _new_id(self) -> str:
        # The chat templates refuse any other length.
        return self._call_hash()[:9]

    def _run(self) -> Step[None]:
        while (yield from self._content_until(_CALLS)):
            start, before = self._position, self.num_calls
            yield from self._space()
            first = yield from self._peek()
            if first == "[":
                self._position += 1
                yield from self._list()
            elif first == "{":
                yield from self._call()
            else:
                yield from self._named()
            if self.num_calls == before:
                self._position = start
                self._content(self._buffer[:start])
            else:
                yield from self._space()
            self._commit()

    def _list(self) -> Step[None]:
        while True:
            yield from self._space()
            if not (yield from self._call()):
                self._position = 0
                break
            yield from self._space()
            if not (yield from self._literal(",")):
                break
        yield from self._space()
        yield from self._literal("]")

    def _named(self) -> Step[None]:
        start = self._position
        while (char := (yield from self._peek())).isalnum() or char in ("_", "-", "."):
            self._position += 1
        name = self._buffer[start : self._position]
        if name not in self._tool_names:
            return
        if (yield from self._literal(_ID)):
            while (yield from self._peek()).isalnum():
                self._position += 1
        yield from self._literal(_ARGS)
        yield from self._space()
        if (yield from self._peek()) == "{":
            self._start(name)
            yield from self._json(stream=True)

    @classmethod
    def grammar(cls, tools: Sequence[Tool], parallel: bool, tokenizer: Tokenizer) -> str:
        start = marker_term(_CALLS, tokenizer)
        args = tokenizer.special_token_id(_ARGS)
        if args is None:
            more = ' (", " call)*' if parallel else ""
            rules = [f"calls: {start} list", "free: TEXT | lead list", f'list: " "? "[" call{more} "]"']
            return "\n".join([*rules, lead_rules(_CALLS, tokenizer) + one_of_tools(tools, "arguments")])
        bodies = [
            f"tool_{index}: {json.dumps(tool.name)} <[{args}]> {tool.schema_term()}" for index, tool in enumerate(tools)
        ]
        rules = [
            f"calls: ({start} body){'+' if parallel else ''}",
            "free: (lead body)* TEXT" if parallel else "free: TEXT | lead body",
            "body: " + " | ".join(f"tool_{index}" for index in range(len(tools))),
        ]
        return "\n".join([*rules, *bodies, lead_rules(_CALLS, tokenizer)])
