"""Tool calls as Llama 3 writes them: the whole answer is {"name": …, "parameters": {…}}, several after semicolons."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from llmc.runtime.text.tokenizer import Tokenizer

from ..text_machine import Step
from .definitions import Tool
from .parser import ToolCallParser, one_of_tools

_PYTHON_TAG = "<|python_tag|>"


class Llama3JsonParser(ToolCallParser):
    """Parses an answer that is all calls. One that starts otherwise, or calls no known function, is content."""

    name = "llama3_json"
    markers: ClassVar[tuple[str, ...]] = (_PYTHON_TAG,)

    def _run(self) -> Step[None]:
        while True:
            yield from self._space()
            yield from self._literal(_PYTHON_TAG)
            yield from self._space()
            if not (yield from self._call()):
                break
            yield from self._space()
            yield from self._literal(";")
            yield from self._space()
            self._commit()
        yield from self._rest()

    @classmethod
    def grammar(cls, tools: Sequence[Tool], parallel: bool, tokenizer: Tokenizer) -> str:
        more = ' ("; " call)*' if parallel else ""
        # Only an answer that starts with a brace is a call.
        free = "free: calls | TEXT\nTEXT: /[ \\t\\r\\n]*([^{ \\t\\r\\n](.|\\n)*)?/"
        return f"calls: call{more}\n{free}\n" + one_of_tools(tools, "parameters")
