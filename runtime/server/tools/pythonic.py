"""Tool calls as Python writes them: [name(key="text", other=[1, True]), name()].

LFM2 and LFM2.5 write them between <|tool_call_start|> and <|tool_call_end|>, Llama 3.2 and Llama 4 as the whole answer,
also between <|python_start|> and <|python_end|>. Sources: https://docs.liquid.ai/lfm/key-concepts/tool-use,
https://www.llama.com/docs/model-cards-and-prompt-formats/llama4, vllm/tool_parsers/pythonic_tool_parser.py of vLLM,
pythonic_detector.py and lfm2_detector.py of SGLang.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import ClassVar

from llmc.runtime.text.tokenizer import Tokenizer

from ..text_machine import Step
from .definitions import Tool
from .parser import CLOSING, ToolCallParser, lead_rules, marker_term
from .python_text import PythonText, is_argument_name, value_as_json
from .pythonic_rules import argument_rules

_CALL_END = ")"


class Lfm2Parser(PythonText, ToolCallParser):
    """Content and calls in any order; white space around calls is not content. Arguments become JSON.

    Besides Python's literals it reads JSON's true, false and null, line breaks in texts, keys in quotes, and a call
    without brackets. Between the markers there may also be calls in JSON, which LFM2 writes if a prompt asks for it.
    """

    name = "lfm2"
    markers: ClassVar[tuple[str, ...]] = ("<|tool_call_start|>", "<|tool_call_end|>")

    def _run(self) -> Step[None]:
        yield from self._between_markers()

    def _between_markers(self, broken: bool = False) -> Step[None]:
        """broken: whether what is left of malformed calls comes first."""
        opening, closing = self.markers
        awaited = self.markers if broken else (opening,)
        while found := (yield from self._content_until(*awaited)):
            awaited = (opening,)
            if found == closing:
                self._commit()
                continue
            start, before = self._position, self.num_calls
            yield from self._space()
            whole = yield from self._calls(bare=True)
            if self.num_calls == before:
                # The marker is content; another one may follow it.
                self._position = start
                self._content(self._buffer[:start])
                self._commit()
                continue
            if whole:
                yield from self._space()
            if not (yield from self._literal(closing, cut=True)):
                # What is left of malformed calls is content, but not their end.
                awaited = self.markers
            yield from self._space()
            self._commit()

    def _calls(self, *, bare: bool) -> Step[bool]:
        """Reads calls; False if they are malformed, and then goes back to where. bare: also one without brackets."""
        bracket = yield from self._literal("[")
        if not bracket and not bare:
            return False
        while True:
            yield from self._space()
            in_json = (yield from self._peek()) == "{"
            if not (yield from (self._call() if in_json else self._python_call())):
                return self._malformed() if in_json else False
            yield from self._space()
            if not bracket or not (yield from self._literal(",")):
                break
        return not bracket or (yield from self._literal("]"))

    def _python_call(self) -> Step[bool]:
        """Reads one call and emits it; False if it is malformed. If nothing was emitted, it was none."""
        for name in self._tool_names:
            start = self._position
            if (yield from self._literal(name)):
                yield from self._space()
                if (yield from self._literal("(")):
                    return (yield from self._arguments_of(name))
            self._position = start
        return self._malformed()

    def _arguments_of(self, name: str) -> Step[bool]:
        yield from self._space()
        if (yield from self._literal(_CALL_END)):
            self._start(name)
            self._tell("{}")
            return True
        key = yield from self._argument_name()
        if key is None:
            return self._malformed()
        self._start(name)
        self._tell(f'{{"{key}":')
        return (yield from self._values())

    def _values(self) -> Step[bool]:
        """Reads and emits the value of the first argument, and all up to the end of the call."""
        closing = [_CALL_END]
        while True:
            yield from self._space()
            first = yield from self._peek()
            if first not in CLOSING:
                if not (yield from self._scalar()):
                    return False
                more = yield from self._after_value(closing)
            else:
                self._position += 1
                self._tell(first)
                closing.append(CLOSING[first])
                more = True
            # Ends of what holds the value, or the next one's key.
            separator = "" if first in CLOSING else ","
            while more:
                yield from self._space()
                if not (yield from self._literal(closing[-1])):
                    if not (yield from self._key(closing[-1], separator)):
                        return False
                    break
                ended = closing.pop()
                self._tell("}" if ended == _CALL_END else ended)
                if not closing:
                    return True
                more = yield from self._after_value(closing)
                separator = ","
            if not more:
                return False

    def _after_value(self, closing: list[str]) -> Step[bool]:
        """Reads the comma after a value, if it has one; False if neither that nor an end follows. The comma is told
        with what follows it, since Python allows one before an end."""
        yield from self._space()
        if (yield from self._literal(",")):
            return True
        return (yield from self._peek()) == closing[-1] or self._malformed()

    def _key(self, end: str, separator: str) -> Step[bool]:
        """Reads and emits what comes before a value. end: of what holds it. Of equal names, readers of JSON take the
        last."""
        if end == "]":
            # Of a list, nothing does; a value must follow.
            if not (yield from self._peek()):
                return self._malformed()
            if separator:
                self._tell(separator)
            return True
        if end == _CALL_END:
            key = yield from self._argument_name()
            if key is None:
                return self._malformed()
        else:
            key = yield from self._whole_text()
            yield from self._space()
            if key is None or not (yield from self._literal(":")):
                return self._malformed()
        self._tell(f'{separator}"{key}":')
        return True

    def _argument_name(self) -> Step[str | None]:
        """Reads a name and its =; returns it as JSON without quotes."""
        if (yield from self._peek()) in ("'", '"'):
            key = yield from self._whole_text()
        else:
            name = yield from self._bare()
            key = name if is_argument_name(name) else None
        yield from self._space()
        return key if key is not None and (yield from self._literal("=")) else None

    def _whole_text(self) -> Step[str | None]:
        """Reads a text; returns it as JSON without quotes."""
        parts: list[str] = []
        if (yield from self._peek()) not in ("'", '"') or not (yield from self._text(parts.append)):
            return None
        return "".join(parts)

    def _scalar(self) -> Step[bool]:
        """Reads and emits a value that holds no others."""
        if (yield from self._peek()) in ("'", '"'):
            self._arguments('"')
            if not (yield from self._text(self._tell)):
                return False
            self._tell('"')
            return True
        word = yield from self._bare()
        # At the end of the text, what it would be is not certain.
        value = value_as_json(word) if (yield from self._peek()) else None
        if value is None:
            return self._malformed()
        self._tell(value)
        return True

    def _malformed(self) -> bool:
        """Goes back to the start of what cannot be read, unless the text ended in it. Always False."""
        if not self._ended or self._position < len(self._buffer):
            self._position = 0
        return False

    def _tell(self, arguments: str) -> None:
        """Emits arguments for what was read."""
        self._arguments(arguments)
        self._commit()

    @classmethod
    def grammar(cls, tools: Sequence[Tool], parallel: bool, tokenizer: Tokenizer) -> str:
        opening, closing = (marker_term(marker, tokenizer) for marker in cls.markers)
        rules = [
            f"calls: {opening} body",
            "free: (lead body)* TEXT" if parallel else "free: TEXT | lead body",
            f"body: bracketed {closing}",
            _bracketed(len(tools), parallel),
        ]
        return "\n".join([*rules, lead_rules(cls.markers[0], tokenizer) + argument_rules(tools)])


class PythonicParser(Lfm2Parser):
    """An answer that is all calls, in brackets, or has them between markers."""

    name = "pythonic"
    markers: ClassVar[tuple[str, ...]] = ("<|python_start|>", "<|python_end|>")

    def _run(self) -> Step[None]:
        # As `grammar` has it: what else Python's str takes for white space begins content.
        while (char := (yield from self._peek())) and char in " \t\r\n":
            self._position += 1
        whole = yield from self._calls(bare=False)
        if self.num_calls == 0:
            self._position = 0
        elif whole:
            yield from self._space()
            yield from self._literal(self.markers[1])
            yield from self._space()
            self._commit()
        yield from self._between_markers(broken=self.num_calls > 0 and not whole)

    @classmethod
    def grammar(cls, tools: Sequence[Tool], parallel: bool, tokenizer: Tokenizer) -> str:
        special = [tokenizer.special_token_id(marker) for marker in cls.markers]
        between = "" if None in special else f" | <[{special[0]}]> bracketed <[{special[1]}]>"
        # Only an answer that starts with a bracket is calls, and what a marker that is mere text begins.
        unmarked = f" & ~/(.|\\n)*{re.escape(cls.markers[0])}(.|\\n)*/" if None in special else ""
        free = f"free: calls | TEXT\nTEXT: /[ \\t\\r\\n]*([^\\[ \\t\\r\\n](.|\\n)*)?/{unmarked}"
        return f"calls: bracketed{between}\n{free}\n{_bracketed(len(tools), parallel)}\n" + argument_rules(tools)


def _bracketed(count: int, parallel: bool) -> str:
    names = " | ".join(f"tool_{index}" for index in range(count))
    more = f' (", " ({names}))*' if parallel else ""
    return f'bracketed: "[" ({names}){more} "]"'
