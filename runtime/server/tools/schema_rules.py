"""Lark rules of a call's arguments in a model's own syntax, from the JSON schemas of tools.

They accept what a schema accepts, or less: declared properties in one order, and others only if none is declared.
"""

from __future__ import annotations

import json
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar
from urllib.parse import unquote

from llmc.runtime.guided.constraint import MAX_NESTING, schema_text
from llmc.runtime.request_error import RequestError

from .definitions import Tool


def words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Keywords that say nothing about a value.
_NEUTRAL = words(
    "title description $comment default examples deprecated readOnly writeOnly $schema $id $anchor $defs definitions"
    " type"
)
_NUMBERS = words("minimum maximum exclusiveMinimum exclusiveMaximum multipleOf")
# Keywords by the kind of value that they apply to, and those of them that are enforced; for texts, see `Rules`.
_KEYWORDS: Mapping[str, frozenset[str]] = {
    "string": words("minLength maxLength pattern format contentEncoding contentMediaType"),
    "number": _NUMBERS,
    "array": words("items prefixItems minItems maxItems uniqueItems contains minContains maxContains"),
    "object": words(
        "properties required additionalProperties patternProperties propertyNames minProperties maxProperties"
        " dependentRequired dependentSchemas unevaluatedProperties"
    ),
}
_ENFORCED: Mapping[str, frozenset[str]] = {
    "number": _NUMBERS,
    "array": words("items minItems maxItems"),
    "object": words("properties required additionalProperties patternProperties"),
}
_SHAPES: Mapping[str, type | tuple[type, ...]] = {
    **dict.fromkeys(("properties", "patternProperties"), Mapping),
    **dict.fromkeys(("required", "enum", "anyOf", "oneOf", "allOf"), list),
    **dict.fromkeys(("minLength", "maxLength", "minItems", "maxItems"), int),
    **dict.fromkeys(("pattern", "$ref"), str),
    "type": (str, list),
}
_TYPES = ("string", "number", "integer", "boolean", "null", "array", "object")


class Rules(ABC):
    """Rules and terminals of a grammar; equal ones are shared. Subclasses know the syntax of values.

    any_rules: rules of `any`, any value. enforced: keywords of texts that are enforced. true_false, null, comma: terms.
    brackets: of an object. call_brackets: of the arguments of a call, if they are no object.
    """

    any_rules: ClassVar[str]
    enforced: ClassVar[frozenset[str]]
    true_false: ClassVar[str]
    null: ClassVar[str]
    comma: ClassVar[str]
    brackets: ClassVar[tuple[str, str]] = ('"{"', '"}"')
    call_brackets: ClassVar[tuple[str, str] | None] = None

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._names: dict[str, str] = {}

    def add(self, name: str, body: str) -> None:
        self._lines.append(f"{name}: {body}")

    def named(self, body: str, *, terminal: bool = False, lazy: bool = False) -> str:
        """The name of a rule with that body."""
        if body not in self._names:
            name = f"{'T' if terminal else 'r'}{len(self._lines)}"
            self._names[body] = name
            self.add(name + ("[lazy]" if lazy else ""), body)
        return self._names[body]

    def reserve(self) -> str:
        """A name for a rule that is added later."""
        self._lines.append("")
        return f"d{len(self._lines)}"

    def text(self) -> str:
        return self.any_rules + "\n".join(filter(None, self._lines))

    @abstractmethod
    def string(self, schema: Mapping[str, Any], place: str, least: int, most: int | None, *, strict: bool) -> str:
        """A text that follows the enforced keywords. least, most: its length."""

    @abstractmethod
    def literal(self, value: Any) -> str:
        """A value as the model writes it."""

    @abstractmethod
    def key(self, name: str, *, call: bool) -> str:
        """The name of a property, up to its value. call: of an argument."""

    @abstractmethod
    def new_key(self, pattern: str | None, *, call: bool) -> str:
        """The same of any name, or of any that matches."""

    def ordered(self, names: Iterable[str]) -> Sequence[str]:
        """Declared properties in the order in which the model writes them."""
        return tuple(names)


class Schemas:
    """The schemas of one tool. Keywords that cannot be enforced are refused if it is strict, else ignored."""

    def __init__(self, tool: Tool, rules: Rules) -> None:
        self._tool, self._rules = tool, rules
        self._root: dict[str, Any] = json.loads(tool.parameters)
        self._targets: dict[tuple[str, bool], str] = {}

    def arguments(self) -> str:
        """The term of the tool's arguments. Raises RequestError."""
        return self._value(self._root, "#", call=self._rules.call_brackets is not None)

    def _fail(self, place: str, why: str) -> RequestError:
        return RequestError(f"tool {self._tool.name}: the JSON schema is not supported at {place}: {why}")

    def _unenforced(self, place: str, keyword: str) -> None:
        if self._tool.strict:
            why = f"{keyword} cannot be enforced in this model's format of calls: remove it, or set strict to false"
            raise self._fail(place, why)

    def _check(self, schema: Mapping[str, Any], place: str) -> None:
        """The kinds of what its keywords say."""
        for keyword, shape in _SHAPES.items():
            if keyword in schema and not isinstance(schema[keyword], shape):
                raise self._fail(f"{place}/{keyword}", "the value is of the wrong type")
        for keyword in ("required", "type"):
            if not all(isinstance(name, str) for name in schema.get(keyword, ())):
                raise self._fail(f"{place}/{keyword}", "not all of it is text")

    def _value(self, schema: Any, place: str, *, call: bool = False) -> str:
        """The term of a value. call: of the arguments of a call, which are no object in the model's syntax."""
        if place.count("/") > MAX_NESTING:
            raise self._fail(place, "it is nested too deep, or refers to itself")
        if schema is True:
            return self._object({}, place, call=True) if call else "any"
        if not isinstance(schema, Mapping):
            raise self._fail(place, "no value satisfies it")
        self._check(schema, place)
        if "$ref" in schema:
            for keyword in schema.keys() - _NEUTRAL - {"$ref"}:
                self._unenforced(place, keyword)
            return self._ref(schema["$ref"], place, call=call)
        if call and ("const" in schema or "enum" in schema):
            raise self._fail(place, "a list of whole calls")
        if "const" in schema or "enum" in schema:
            return self._one_of_values(schema, place)
        for keyword in ("anyOf", "oneOf"):
            if keyword in schema:
                rest = {key: value for key, value in schema.items() if key != keyword}
                options = [
                    self._value(
                        self._merged(rest, option, f"{place}/{keyword}/{index}"),
                        f"{place}/{keyword}/{index}",
                        call=call,
                    )
                    for index, option in enumerate(schema[keyword])
                    if option is not False
                ]
                return self._choice(options, place)
        if "allOf" in schema:
            merged: Any = {key: value for key, value in schema.items() if key != "allOf"}
            for index, part in enumerate(schema["allOf"]):
                merged = self._merged(merged, self._resolved(part, place), f"{place}/allOf/{index}")
            return self._value(merged, f"{place}/allOf", call=call)
        if call:
            return self._typed(schema, "object", place, call=True)
        types = schema.get("type", _implied_types(schema))
        if types is None:
            for keyword in schema.keys() - _NEUTRAL:
                self._unenforced(place, keyword)
            return "any"
        return self._choice(
            [self._typed(schema, each, place) for each in ([types] if isinstance(types, str) else types)], place
        )

    def _choice(self, options: Sequence[str], place: str) -> str:
        if not options:
            raise self._fail(place, "no value satisfies it")
        return options[0] if len(options) == 1 else self._rules.named(" | ".join(dict.fromkeys(options)))

    def _one_of_values(self, schema: Mapping[str, Any], place: str) -> str:
        for keyword in schema.keys() - _NEUTRAL - {"const", "enum"}:
            self._unenforced(place, keyword)
        types = schema.get("type", _TYPES)
        values = [schema["const"]] if "const" in schema else schema["enum"]
        if not _all_finite(values):
            raise self._fail(place, "a number is not finite")
        fitting = [value for value in values if _has_type(value, (types,) if isinstance(types, str) else types)]
        return self._choice([self._rules.literal(value) for value in fitting], place)

    def _typed(self, schema: Mapping[str, Any], kind: Any, place: str, *, call: bool = False) -> str:
        """The term of a value of one type."""
        group = "number" if kind == "integer" else kind
        enforced = self._rules.enforced if group == "string" else _ENFORCED.get(group, frozenset())
        elsewhere = frozenset[str]().union(*(words for name, words in _KEYWORDS.items() if name != group))
        for keyword in sorted(schema.keys() - _NEUTRAL - enforced - elsewhere):
            self._unenforced(place, keyword)
        if kind == "string":
            return self._string(schema, place)
        if group == "number":
            bounds = {key: value for key, value in schema.items() if key in _NUMBERS}
            return "%json " + schema_text(place, {"type": kind, **bounds}, strict=self._tool.strict)
        if kind == "array":
            return self._list(schema, place)
        if kind == "object":
            return self._object(schema, place, call=call)
        if kind not in _TYPES:
            raise self._fail(place, f"the type {kind!r} is unknown")
        return self._rules.named(self._rules.true_false) if kind == "boolean" else self._rules.null

    def _string(self, schema: Mapping[str, Any], place: str) -> str:
        least, most = self._bounds(schema, "minLength", "maxLength", place)
        return self._rules.string(schema, place, least, most, strict=self._tool.strict)

    def _list(self, schema: Mapping[str, Any], place: str) -> str:
        least, most = self._bounds(schema, "minItems", "maxItems", place)
        if most == 0 or schema.get("items") is False:
            if least:
                raise self._fail(place, "no value satisfies it")
            return '"[" "]"'
        item = self._value(schema.get("items", True), f"{place}/items")
        more = f"({self._rules.comma} {item}){times(max(least - 1, 0), None if most is None else most - 1)}"
        filled = f"{item} {more}"
        return self._rules.named(f'"[" {filled if least else f"({filled})?"} "]"')

    def _bounds(self, schema: Mapping[str, Any], low: str, high: str, place: str) -> tuple[int, int | None]:
        least, most = schema.get(low, 0), schema.get(high)
        if not isinstance(least, int) or not isinstance(most, int | None) or (most is not None and most < least):
            raise self._fail(place, f"{low} and {high} allow no value")
        return least, most

    def _object(self, schema: Mapping[str, Any], place: str, *, call: bool) -> str:
        declared, required = schema.get("properties", {}), schema.get("required", [])
        others, patterns = schema.get("additionalProperties", True), schema.get("patternProperties", {})
        listed = {**declared, **{name: others for name in required if name not in declared}}
        members = []
        for name in self._rules.ordered(listed):
            if listed[name] is False and name not in required:
                continue
            value = self._value(listed[name], f"{place}/properties/{name}")
            members.append((f"{self._rules.key(name, call=call)} {value}", name in required))
        brackets = self._rules.call_brackets if call and self._rules.call_brackets else self._rules.brackets
        if members:
            return self._members(members, *brackets)
        free: list[tuple[str | None, Any]] = list(patterns.items())
        if others is not False:
            free.append((None, others))
        terms = [
            f"{self._rules.new_key(pattern, call=call)} {self._value(child, f'{place}/additionalProperties')}"
            for pattern, child in free
        ]
        opening, closing = brackets
        if not terms:
            return f"{opening} {closing}"
        member = self._rules.named(" | ".join(terms))
        return self._rules.named(f"{opening} ({member} ({self._rules.comma} {member})*)? {closing}")

    def _members(self, members: Sequence[tuple[str, bool]], opening: str, closing: str) -> str:
        """An object of members (term, required) in their order. From its end on: the rules of what may follow nothing,
        and of what may follow another member."""
        first, after = "", ""
        for term, required in reversed(members):
            alone = f"{term} {after}".strip()
            comma = self._rules.comma
            behind = f"{comma} {term}" if required else f"({comma} {term})?"
            first = self._rules.named(alone if required else f"{alone} | {first}" if first else f"({alone})?")
            after = self._rules.named(f"{behind} {after}".strip())
        return self._rules.named(f"{opening} {first} {closing}")

    def _ref(self, pointer: Any, place: str, *, call: bool) -> str:
        if (pointer, call) not in self._targets:
            self._targets[pointer, call] = name = self._rules.reserve()
            self._rules.add(name, self._value(self._target(pointer, place), pointer, call=call))
        return self._targets[pointer, call]

    def _target(self, pointer: Any, place: str) -> Any:
        found: Any = self._root
        for part in str(pointer).split("/")[1:] if str(pointer).startswith("#") else ["", ""]:
            name = unquote(part).replace("~1", "/").replace("~0", "~")
            found = found.get(name) if isinstance(found, Mapping) else None
        if found is None:
            raise self._fail(place, f"it refers to {pointer!r}, which is not there")
        return found

    def _resolved(self, part: Any, place: str) -> Any:
        return self._target(part["$ref"], place) if isinstance(part, Mapping) and part.keys() == {"$ref"} else part

    def _merged(self, base: Mapping[str, Any], part: Any, place: str) -> Any:
        """A schema for what satisfies both, as far as that can be said by keyword."""
        if part is True:
            return base
        if not isinstance(part, Mapping):
            return part
        self._check(part, place)
        merged = dict(base)
        for key, value in part.items():
            if key not in base or key in _NEUTRAL - {"type"} or base[key] == value:
                merged[key] = value
            elif key == "required":
                merged[key] = list(dict.fromkeys([*base[key], *value]))
            elif key == "properties":
                merged[key] = {**base[key], **value}
                for name in base[key].keys() & value.keys():
                    if base[key][name] != value[name]:
                        self._unenforced(place, f"the property {name!r}")
            else:
                self._unenforced(place, key)
                merged[key] = value
        return merged


def times(least: int, most: int | None) -> str:
    """How often a term comes."""
    return f"{{{least},{'' if most is None else most}}}"


def terminal(pattern: str, and_: str = "") -> str:
    """A terminal that satisfies a pattern of JSON Schema: a whole match of it, without the anchors around it."""
    from llguidance import regex_to_lark

    body = re.sub(r"(?<!\\)\$$", "", pattern.removeprefix("^"))
    return f"{and_}/{regex_to_lark(f'(?:{body})', 'dw')}/"


def _implied_types(schema: Mapping[str, Any]) -> Sequence[str] | None:
    """The types that a schema without `type` has keywords for."""
    return [kind for kind, words in _KEYWORDS.items() if schema.keys() & words] or None


def _has_type(value: Any, types: Sequence[str]) -> bool:
    if isinstance(value, bool):
        return "boolean" in types
    if isinstance(value, int | float):
        return "number" in types or ("integer" in types and (isinstance(value, int) or value.is_integer()))
    kinds: list[tuple[type, str]] = [(str, "string"), (list, "array"), (dict, "object")]
    return next((name for kind, name in kinds if isinstance(value, kind)), "null") in types


def _all_finite(value: Any) -> bool:
    """Whether a value of JSON has no number that JSON cannot write."""
    if isinstance(value, float):
        return math.isfinite(value)
    held = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    return all(map(_all_finite, held))
