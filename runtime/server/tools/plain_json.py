"""Tool calls of a model without its own format: {"name": …, "arguments": {…}}, one per line.

Only for calls that a request requires: the constraint makes the model write this, whatever its training.
"""

from __future__ import annotations

from collections.abc import Sequence

from llmc.runtime.text.tokenizer import Tokenizer

from .definitions import Tool
from .llama3_json import Llama3JsonParser
from .parser import one_of_tools


class PlainJsonParser(Llama3JsonParser):
    """Reads as its base does; writes OpenAI's keys."""

    name = "json"

    @classmethod
    def grammar(cls, tools: Sequence[Tool], parallel: bool, tokenizer: Tokenizer) -> str:
        more = ' ("\\n" call)*' if parallel else ""
        return f"calls: call{more}\n" + one_of_tools(tools, "arguments")
