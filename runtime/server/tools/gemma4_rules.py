"""Lark rules of arguments in Gemma 4's syntax, with properties sorted by name, as in the model's chat template."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

from llmc.runtime.guided.constraint import lark_text
from llmc.runtime.text.tokenizer import Tokenizer

from .definitions import Tool
from .parser import marker_term
from .schema_rules import Rules, Schemas, terminal, times, words

# What a key may be without quotes; one that the model makes up is simpler.
_BARE_KEY = re.compile(r'[^\s:}"<]([^:}<]*[^\s:}<])?')
_NEW_KEY = r'[^\s:{}\[\],"<>]+'
_ANY_RULES = r"""any: text | object | list | NUMBER | "true" | "false" | "null"
object: "{" (member ("," member)*)? "}"
member: NEW_KEY ":" any
list: "[" (any ("," any)*)? "]"
NUMBER: /-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?/
"""


def argument_rules(tools: Sequence[Tool], quote: str, tokenizer: Tokenizer) -> str:
    """A rule tool_0, tool_1, … for each tool, with its name and arguments. Raises RequestError."""
    rules = _Rules(quote, tokenizer)
    for index, tool in enumerate(tools):
        rules.add(f"tool_{index}", f"{lark_text(tool.name)} {Schemas(tool, rules).arguments()}")
    return rules.text()


class _Rules(Rules):
    any_rules = _ANY_RULES
    enforced: ClassVar[frozenset[str]] = words("minLength maxLength pattern")
    true_false = '"true" | "false"'
    null = '"null"'
    comma = '","'

    def __init__(self, quote: str, tokenizer: Tokenizer) -> None:
        super().__init__()
        self._quote = marker_term(quote, tokenizer)
        self._special = tokenizer.special_token_id(quote) is not None
        self.add("text", self._quoted("/(.|\\n)*/"))
        self.add("NEW_KEY", f"/{_NEW_KEY}/")

    def _quoted(self, content: str) -> str:
        """A quoted string; content: an expression of terminals."""
        if self._special:
            return f"{self._quote} {self.named(content, terminal=True)} {self._quote}"
        return f"{self._quote} {self.named(f'({content}) {self._quote}', lazy=True)}"

    def string(self, schema: Mapping[str, Any], place: str, least: int, most: int | None, *, strict: bool) -> str:
        if "pattern" not in schema:
            return "text" if not least and most is None else self._quoted(f"/(.|\\n){times(least, most)}/")
        pattern = terminal(schema["pattern"])
        return self._quoted(pattern if not least and most is None else f"{pattern} & /(.|\\n){times(least, most)}/")

    def literal(self, value: Any) -> str:
        if isinstance(value, str):
            return f"{self._quote} {lark_text(value)} {self._quote}" if value else f"{self._quote} {self._quote}"
        if isinstance(value, Mapping):
            members = [f"{self.key(key, call=False)} {self.literal(value[key])}" for key in self.ordered(value)]
            return f'"{{" {_joined(members)} "}}"'
        if isinstance(value, list):
            return f'"[" {_joined([self.literal(item) for item in value])} "]"'
        return lark_text(json.dumps(value))

    def key(self, name: str, *, call: bool) -> str:
        return (lark_text(name) if _BARE_KEY.fullmatch(name) else self.literal(name)) + ' ":"'

    def new_key(self, pattern: str | None, *, call: bool) -> str:
        name = "NEW_KEY" if pattern is None else self.named(terminal(pattern, f"/{_NEW_KEY}/ & "), terminal=True)
        return f'{name} ":"'

    def ordered(self, names: Iterable[str]) -> Sequence[str]:
        return sorted(names, key=str.lower)


def _joined(terms: Sequence[str]) -> str:
    return ' "," '.join(terms)
