"""Common code of tool call parsers: reading one call, and streaming it in OpenAI's form."""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Collection, Sequence
from typing import ClassVar

from llmc.runtime.text.tokenizer import Tokenizer

from ..chat_output import ChatDelta
from ..text_machine import Step, TextMachine
from .definitions import Tool

_ARGUMENTS = ("arguments", "parameters")
CLOSING = {"{": "}", "[": "]"}


class ToolCallParser(TextMachine):
    """Separates tool calls from content while the text comes in.

    tool_names: callable functions; a call of any other is content. answer: name of the answer, from which its calls get
    the same ids on every parse; None: a random name. A call that is malformed before its arguments begin is also
    content. From there on the arguments stream as the model writes them, up to where they stop being JSON. Subclasses
    set `name` and `markers`, tokens that the text must show even if they are special.
    """

    name: ClassVar[str]
    markers: ClassVar[tuple[str, ...]]

    def __init__(self, tool_names: Collection[str], answer: str | None = None) -> None:
        self._tool_names = tool_names
        self._answer = answer or uuid.uuid4().hex
        self.num_calls = 0
        super().__init__()

    @classmethod
    def grammar(cls, tools: Sequence[Tool], parallel: bool, tokenizer: Tokenizer) -> str:
        """Lark rules. `calls` is one call of `tools`, with `parallel` one or more. `free` is any text in which all
        calls have that form."""
        raise NotImplementedError

    def _new_id(self) -> str:
        return f"call_{self._call_hash()[:24]}"

    def _call_hash(self) -> str:
        """Hash of the next call, in hexadecimal digits."""
        return hashlib.sha256(f"{self._answer} {self.num_calls}".encode()).hexdigest()

    def _start(self, name: str) -> None:
        call = {"index": self.num_calls, "id": self._new_id(), "type": "function"}
        self._deltas.append(ChatDelta(tool_calls=({**call, "function": {"name": name, "arguments": ""}},)))
        self.num_calls += 1

    def _arguments(self, text: str) -> None:
        """Emits more of the last call's arguments, joined with the part just before."""
        if not text:
            return
        index = self.num_calls - 1
        if self._deltas and self._deltas[-1].tool_calls and "id" not in self._deltas[-1].tool_calls[0]:
            text = self._deltas.pop().tool_calls[0]["function"]["arguments"] + text
        self._deltas.append(ChatDelta(tool_calls=({"index": index, "function": {"arguments": text}},)))

    def _call(self) -> Step[bool]:
        """Reads {"name": …, "arguments": {…}}, keys in any order. False if it is no call; nothing was emitted then."""
        name: str | None = None
        early: str | None = None  # arguments that came before the name
        before = self.num_calls
        if not (yield from self._literal("{")):
            return False
        while True:
            yield from self._space()
            key = yield from self._string()
            yield from self._space()
            if key is None or not (yield from self._literal(":")):
                break
            yield from self._space()
            if key == "name" and name is None:
                name = yield from self._string()
                if name is None or name not in self._tool_names:
                    return False
                if early is not None:
                    self._start(name)
                    self._arguments(early)
                    self._commit()
            elif key in _ARGUMENTS and early is None and self.num_calls == before:
                if name is not None and (yield from self._peek()) == "{":
                    self._start(name)
                    if not (yield from self._json(stream=True)):
                        break
                else:
                    early = yield from self._early_arguments()
                    if early is None:
                        return False
                    if name is not None:
                        self._start(name)
                        self._arguments(early)
                        self._commit()
            elif not (yield from self._skip_value()):
                break
            yield from self._space()
            if (yield from self._literal(",")):
                continue
            if name is not None and (yield from self._literal("}")):
                if self.num_calls == before:
                    self._start(name)
                    self._arguments("{}")
                self._commit()
                return True
            break
        if self.num_calls > before:
            self._commit()
        return self.num_calls > before

    def _early_arguments(self) -> Step[str | None]:
        """Arguments that cannot be streamed: before a name, null, or JSON inside a string. None: no arguments."""
        start = self._position
        first = yield from self._peek()
        if first == "{":
            return self._buffer[start : self._position] if (yield from self._json()) else None
        if first == '"':
            return (yield from self._string())
        return "{}" if (yield from self._literal("null")) else None

    def _skip_value(self) -> Step[bool]:
        first = yield from self._peek()
        if first in CLOSING:
            return (yield from self._json())
        if first == '"':
            return (yield from self._string()) is not None
        start = self._position
        while (char := (yield from self._peek())).isalnum() or char in ("-", "+", "."):
            self._position += 1
        return self._position > start

    def _string(self) -> Step[str | None]:
        """Reads a JSON string; None if there is none, or it is invalid."""
        start = self._position
        if not (yield from self._literal('"')):
            return None
        while (char := (yield from self._peek())) != '"':
            if not char:
                return None
            self._position += 1
            if char == "\\":
                yield from self._peek()
                self._position += 1
        self._position += 1
        try:
            text = str(json.loads(self._buffer[start : self._position], strict=False))
            text.encode()  # half a surrogate pair is no text
        except ValueError:
            return None
        return text

    def _json(self, *, stream: bool = False) -> Step[bool]:
        """Reads an object or array by its brackets and strings; False where it stops being one.

        stream: emit it as arguments while it comes in.
        """
        open_brackets: list[str] = []
        in_string = escaped = False
        whole = True
        if stream:
            self._commit()
        while True:
            if self._position == len(self._buffer):
                if stream:
                    self._arguments(self._buffer)
                    self._commit()
                if not (yield from self._peek()):
                    return False
            char = self._buffer[self._position]
            if in_string:
                in_string = escaped or char != '"'
                escaped = char == "\\" and not escaped
            elif char == '"':
                in_string = True
            elif char in CLOSING:
                open_brackets.append(CLOSING[char])
            elif char in ("}", "]"):
                whole = char == open_brackets.pop()
            else:
                whole = char.isalnum() or char.isspace() or char in ",:+-."
            if not whole:
                break
            self._position += 1
            if not open_brackets:
                break
        if stream:
            self._arguments(self._buffer[: self._position])
            self._commit()
        return whole


def one_of_tools(tools: Sequence[Tool], arguments_key: str, extra: str = "") -> str:
    """Lark rule `call`: the JSON object of a call of one of the tools."""
    rules = [
        f"tool_{index}: {_literal(tool.name, arguments_key)} {tool.schema_term()} {json.dumps(extra + '}')}"
        for index, tool in enumerate(tools)
    ]
    return "\n".join(["call: " + " | ".join(f"tool_{index}" for index in range(len(tools))), *rules])


def _literal(name: str, arguments_key: str) -> str:
    return json.dumps(f'{{"name": {json.dumps(name)}, "{arguments_key}": ')


def lead_rules(marker: str, tokenizer: Tokenizer) -> str:
    """Lark rules: TEXT is any text, `lead` any text that ends with the first marker."""
    token = tokenizer.special_token_id(marker)
    lead = f"lead[lazy]: TEXT {json.dumps(marker)}" if token is None else f"lead: TEXT <[{token}]>"
    return f"TEXT: /(.|\\n)*/\n{lead}\n"


def marker_term(marker: str, tokenizer: Tokenizer) -> str:
    """A marker as a term of a Lark grammar: the special token if it is one, else its text."""
    token = tokenizer.special_token_id(marker)
    return json.dumps(marker) if token is None else f"<[{token}]>"
