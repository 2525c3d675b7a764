"""Lark rules of calls in Python's syntax. Texts and numbers are those of JSON, which are Python's, too."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from llmc.runtime.guided.constraint import lark_text, schema_text

from .definitions import Tool
from .python_text import is_argument_name
from .schema_rules import Rules, Schemas, terminal, words

_NAME = "/[A-Za-z_][A-Za-z0-9_]*/"
_TEXT = '%json {"type": "string"}'
_ANY_RULES = f"""any: text | dict | list | NUMBER | "True" | "False" | "None"
dict: "{{" (member (COMMA member)*)? "}}"
member: text COLON any
list: "[" (any (COMMA any)*)? "]"
text: {_TEXT}
NAME: {_NAME}
COMMA: /, ?/
COLON: /: ?/
NUMBER: /-?(0|[1-9][0-9]*)(\\.[0-9]+)?([eE][+-]?[0-9]+)?/
"""


def argument_rules(tools: Sequence[Tool]) -> str:
    """A rule tool_0, tool_1, … for each tool: a call of it. Raises RequestError."""
    rules = _Rules()
    for index, tool in enumerate(tools):
        rules.add(f"tool_{index}", f"{lark_text(tool.name)} {Schemas(tool, rules).arguments()}")
    return rules.text()


class _Rules(Rules):
    any_rules = _ANY_RULES
    enforced: ClassVar[frozenset[str]] = words("minLength maxLength pattern format")
    true_false = '"True" | "False"'
    null = '"None"'
    comma = "COMMA"
    call_brackets = ('"("', '")"')

    def string(self, schema: Mapping[str, Any], place: str, least: int, most: int | None, *, strict: bool) -> str:
        found = {key: value for key, value in schema.items() if key in self.enforced}
        return "%json " + schema_text(place, {"type": "string", **found}, strict=strict) if found else "text"

    def literal(self, value: Any) -> str:
        return lark_text(_written(value))

    def key(self, name: str, *, call: bool) -> str:
        if call:
            return lark_text(f"{name if is_argument_name(name) else _written(name)}=")
        return f"{lark_text(_written(name))} COLON"

    def new_key(self, pattern: str | None, *, call: bool) -> str:
        if call:
            name = "NAME" if pattern is None else self.named(terminal(pattern, f"{_NAME} & "), terminal=True)
            return f'{name} "="'
        return f"{self.string({} if pattern is None else {'pattern': pattern}, '#', 0, None, strict=False)} COLON"


def _written(value: Any) -> str:
    """A value of JSON in Python's syntax."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_written(key)}: {_written(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_written, value)) + "]"
    if value is None or isinstance(value, bool):
        return str(value)
    return json.dumps(value, ensure_ascii=False)
