"""Tool calls as Gemma 4 writes them: <|tool_call>call:name{key:<|"|>text<|"|>,other:[1,true]}<tool_call|>.

Keys are bare, and strings stand between <|"|>, without escapes. Sources: the control tokens at
https://ai.google.dev/gemma/docs/core/prompt-formatting-gemma4, the model's chat template, common/parsers/gemma4.cpp of
llama.cpp, vllm/tool_parsers/gemma4_tool_parser.py of vLLM, gemma4_detector.py of SGLang.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from llmc.runtime.text.tokenizer import Tokenizer

from ..text_machine import Step, overlap
from .definitions import Tool
from .gemma4_rules import argument_rules
from .parser import CLOSING, ToolCallParser, lead_rules, marker_term

_OPEN, _CLOSE, QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
# The chat template shows null in an earlier call as None, which the model may repeat.
_WORDS = {"true": "true", "false": "false", "null": "null", "None": "null"}


class Gemma4Parser(ToolCallParser):
    """Content and calls in any order; white space around calls is not content. Arguments become JSON.

    Besides the format itself it reads keys and strings in either kind of quotes. A bare word is a string, as in vLLM
    and SGLang.
    """

    name = "gemma4"
    markers = (_OPEN, _CLOSE, QUOTE)

    def _run(self) -> Step[None]:
        awaited: tuple[str, ...] = (_OPEN,)
        while found := (yield from self._content_until(*awaited)):
            awaited = (_OPEN,)
            if found == _CLOSE:
                self._commit()
                continue
            start = self._position
            name = yield from self._name()
            if name is None:
                # The marker is content; another one may follow it.
                self._position = start
                self._content(self._buffer[:start])
                self._commit()
                continue
            self._start(name)
            self._commit()
            yield from self._object()
            self._commit()
            yield from self._space()
            if not (yield from self._literal(_CLOSE, cut=True)):
                # What is left of a malformed call is content, but not its end.
                awaited = (_OPEN, _CLOSE)
            yield from self._space()
            self._commit()

    def _name(self) -> Step[str | None]:
        """Reads up to the arguments; None if no callable function is called."""
        yield from self._space()
        if (yield from self._literal("call:")):
            for name in self._tool_names:
                if (yield from self._literal(name)):
                    if (yield from self._peek()) == "{":
                        return name
                    self._position -= len(name)
        return None

    def _object(self) -> Step[None]:
        """Reads the arguments and emits them as JSON, up to where they stop being an object."""
        closing: list[str] = []
        while (yield from self._element(closing)):
            while True:
                yield from self._space()
                if (yield from self._literal(closing[-1])):
                    self._tell(closing.pop())
                    if not closing:
                        return
                elif (yield from self._literal(",")):
                    self._tell(",")
                    break
                else:
                    return

    def _element(self, closing: list[str]) -> Step[bool]:
        """Reads an element of the innermost object or list, up to its end or to where it is empty."""
        while True:
            yield from self._space()
            if closing and closing[-1] == "}":
                if not (yield from self._key()):
                    return False
                yield from self._space()
            first = yield from self._peek()
            if first not in CLOSING:
                return (yield from self._scalar())
            self._position += 1
            self._tell(first)
            closing.append(CLOSING[first])
            yield from self._space()
            if (yield from self._peek()) == closing[-1]:
                return True

    def _key(self) -> Step[bool]:
        start = self._position
        key = yield from (self._quoted() if (yield from self._peek()) in (QUOTE[0], '"') else self._bare(":}"))
        yield from self._space()
        if not key or not (yield from self._literal(":")):
            return self._malformed(start)
        self._tell(json.dumps(key, ensure_ascii=False) + ":")
        return True

    def _quoted(self) -> Step[str | None]:
        """Reads a whole string in either kind of quotes; None if it is none."""
        if not (yield from self._literal(QUOTE)):
            return (yield from self._string())
        start = self._position
        while (end := self._buffer.find(QUOTE, start)) < 0:
            if self._ended:
                self._position = len(self._buffer)
                return None
            yield
        self._position = end + len(QUOTE)
        return self._buffer[start:end]

    def _scalar(self) -> Step[bool]:
        """Reads and emits a value that has no elements."""
        if (yield from self._literal(QUOTE)):
            self._tell('"')
            return (yield from self._text())
        start = self._position
        if (yield from self._peek()) == '"':
            text = yield from self._string()
            value = None if text is None else json.dumps(text, ensure_ascii=False)
        else:
            word = yield from self._bare(",]}")
            # At the end of the text, what it would be is not certain.
            value = _as_json(word) if word and (yield from self._peek()) else None
        if value is None:
            return self._malformed(start)
        self._tell(value)
        return True

    def _malformed(self, start: int) -> bool:
        """Goes back to the start of what cannot be read, unless the text ended in it. Always False."""
        if not self._ended or self._position < len(self._buffer):
            self._position = start
        return False

    def _text(self) -> Step[bool]:
        """Reads and emits the rest of a string while it comes in."""
        while True:
            found = self._buffer.find(QUOTE)
            end = found if found >= 0 else len(self._buffer) - overlap(self._buffer, QUOTE)
            self._position = end
            self._tell(json.dumps(self._buffer[:end], ensure_ascii=False)[1:-1])
            if found >= 0:
                self._position = len(QUOTE)
                self._tell('"')
                return True
            if self._ended:
                self._position = len(self._buffer)
                return False
            yield

    def _bare(self, stops: str) -> Step[str]:
        """Reads text up to one of the characters in `stops` or the end of the call; without white space around it."""
        start = self._position
        while (char := (yield from self._peek())) and char not in stops:
            self._position += 1
            if char == _CLOSE[-1] and self._buffer.endswith(_CLOSE, start, self._position):
                self._position -= len(_CLOSE)
                break
        return self._buffer[start : self._position].strip()

    def _tell(self, arguments: str) -> None:
        """Emits arguments for what was read."""
        self._arguments(arguments)
        self._commit()

    @classmethod
    def grammar(cls, tools: Sequence[Tool], parallel: bool, tokenizer: Tokenizer) -> str:
        start, end = marker_term(_OPEN, tokenizer), marker_term(_CLOSE, tokenizer)
        names = " | ".join(f"tool_{index}" for index in range(len(tools)))
        rules = [
            f"calls: ({start} body){'+' if parallel else ''}",
            "free: (lead body)* TEXT" if parallel else "free: TEXT | lead body",
            f'body: "call:" ({names}) {end}',
        ]
        return "\n".join([*rules, lead_rules(_OPEN, tokenizer) + argument_rules(tools, QUOTE, tokenizer)])


def _as_json(word: str) -> str:
    value = word if _NUMBER.fullmatch(word) else _WORDS.get(word)
    return json.dumps(word, ensure_ascii=False) if value is None else value
