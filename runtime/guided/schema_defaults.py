"""Defaults for what a JSON schema leaves open: whether objects are closed, and the length of strings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from llmc.runtime.request_error import RequestError

MAX_STRING = 1 << 16
_ANNOTATIONS = frozenset(
    {"title", "description", "$comment", "default", "examples", "deprecated", "readOnly", "writeOnly"}
)
_FIXED = frozenset({"const", "enum", "$ref", "anyOf", "oneOf", "allOf", "if"})
_DEFINITIONS = ("$defs", "definitions")
_ANY = "json-of-bounded-strings"
_ANY_REF = {"$ref": f"#/$defs/{_ANY}"}
# Exceeds the longest text of any length-limited format, such as ipv6.
_LONGEST_FORMAT = 64


@dataclass(frozen=True)
class SchemaDefaults:
    """additional_properties: whether an object with listed properties may have others, as in JSON Schema.

    max_string: most characters of a string without maxLength; 0 for no bound. Raises RequestError if out of range.
    """

    additional_properties: bool = True
    max_string: int = 0

    def __post_init__(self) -> None:
        limit = self.max_string
        if isinstance(limit, bool) or not isinstance(limit, int) or not 0 <= limit <= MAX_STRING:
            raise RequestError(f"the bound of strings is {limit!r}: give a whole number from 0 (none) to {MAX_STRING}")

    def apply(self, schema: Mapping[str, Any] | bool) -> Mapping[str, Any] | bool:
        """A copy of the schema with defaults filled in. It must be JSON of bounded depth."""
        if self.additional_properties and self.max_string == 0:
            return schema
        filled: Mapping[str, Any] | bool = _Filling(self, schema).fill(schema, composed=False)
        if self.max_string == 0 or not isinstance(filled, Mapping):
            return filled
        return {**filled, "$defs": {**filled.get("$defs", {}), _ANY: self._any()}}

    def _any(self) -> dict[str, Any]:
        names = f"^(?s:.{{0,{self.max_string}}})$"
        return {
            "anyOf": [
                {"type": ["null", "boolean", "number"]},
                {"type": "string", "maxLength": self.max_string},
                {"type": "array", "items": _ANY_REF},
                {"type": "object", "patternProperties": {names: _ANY_REF}, "additionalProperties": False},
            ]
        }


class _Filling:
    """Fills in one schema. Objects combined by allOf, or by $ref with siblings, stay open: each part would forbid the
    others' properties."""

    def __init__(self, defaults: SchemaDefaults, root: Any) -> None:
        self._defaults = defaults
        self._root = root
        self._composed = self._find_composed()

    def fill(self, schema: Any, *, composed: bool) -> Any:
        limit = self._defaults.max_string
        if not isinstance(schema, Mapping):
            return dict(_ANY_REF) if schema is True and limit else schema
        if limit and schema.keys() <= _ANNOTATIONS and schema is not self._root:
            return dict(_ANY_REF)
        filled: dict[str, Any] = dict(schema)
        for key in ("properties", "patternProperties", *_DEFINITIONS):
            if isinstance(schema.get(key), Mapping):
                filled[key] = {
                    name: self.fill(child, composed=key in _DEFINITIONS and f"#/{key}/{name}" in self._composed)
                    for name, child in schema[key].items()
                }
        for key in ("allOf", "anyOf", "oneOf", "prefixItems", "items"):
            if isinstance(schema.get(key), list):
                inner = key in ("allOf", "anyOf", "oneOf") and (composed or _composes(schema, key))
                filled[key] = [self.fill(child, composed=inner) for child in schema[key]]
        for key in ("items", "additionalProperties"):
            if isinstance(schema.get(key), (Mapping, bool)):
                filled[key] = self.fill(schema[key], composed=False)
        if not composed and not schema.keys() & _FIXED:
            self._close(schema, filled)
        if limit:
            self._bound(schema, filled)
        return filled

    def _close(self, schema: Mapping[str, Any], filled: dict[str, Any]) -> None:
        """States whether an object may have unlisted properties."""
        if "additionalProperties" in schema or "unevaluatedProperties" in schema:
            return
        listed = schema.get("properties")
        if not self._defaults.additional_properties and isinstance(listed, Mapping):
            needed = schema.get("required")
            # Required but unlisted properties must be allowed.
            if not isinstance(needed, list) or all(isinstance(name, str) and name in listed for name in needed):
                filled["additionalProperties"] = False
                return
        if self._defaults.max_string and _may_be(schema, "object"):
            filled["additionalProperties"] = dict(_ANY_REF)

    def _bound(self, schema: Mapping[str, Any], filled: dict[str, Any]) -> None:
        """Bounds strings, and states the items of arrays."""
        if schema.keys() & _FIXED:
            return
        if _may_be(schema, "string") and "maxLength" not in schema and "pattern" not in schema:
            least = schema.get("minLength")
            shortest = least if isinstance(least, int) else 0
            longest = (
                max(self._defaults.max_string, _LONGEST_FORMAT) if "format" in schema else self._defaults.max_string
            )
            filled["maxLength"] = max(longest, shortest)
        if _may_be(schema, "array") and "items" not in schema:
            filled["items"] = dict(_ANY_REF)

    def _find_composed(self) -> set[str]:
        """Pointers of definitions that are parts of a composition."""
        found: set[str] = set()
        seen: set[tuple[int, bool]] = set()
        stack: list[tuple[Any, bool]] = [(self._root, False)]
        while stack:
            schema, composed = stack.pop()
            if not isinstance(schema, Mapping) or (id(schema), composed) in seen:
                continue
            seen.add((id(schema), composed))
            target = schema.get("$ref")
            if isinstance(target, str) and (composed or _composes(schema, "$ref")):
                found.add(target)
                stack.append((self._target(target), True))
            stack.extend((child, inner or (composed and part)) for child, inner, part in _children(schema))
        return found

    def _target(self, pointer: str) -> Any:
        parts = pointer.split("/")
        if len(parts) != 3 or parts[0] != "#" or parts[1] not in _DEFINITIONS or not isinstance(self._root, Mapping):
            return None
        definitions = self._root.get(parts[1])
        return definitions.get(parts[2]) if isinstance(definitions, Mapping) else None


def _children(schema: Mapping[str, Any]) -> Iterator[tuple[Any, bool, bool]]:
    """(child, whether it is part of a composition here, whether it describes the same value as the schema)."""
    for key in ("properties", "patternProperties", *_DEFINITIONS):
        if isinstance(schema.get(key), Mapping):
            yield from ((child, False, False) for child in schema[key].values())
    for key in ("allOf", "anyOf", "oneOf"):
        if isinstance(schema.get(key), list):
            yield from ((child, _composes(schema, key), True) for child in schema[key])
    for key in ("prefixItems", "items"):
        if isinstance(schema.get(key), list):
            yield from ((child, False, False) for child in schema[key])
    yield from ((schema[key], False, False) for key in ("items", "additionalProperties") if key in schema)


def _composes(schema: Mapping[str, Any], key: str) -> bool:
    """Whether the schema at `key` is combined with its siblings."""
    several = key == "allOf" and len(schema[key]) > 1
    beside = schema.keys() - _ANNOTATIONS - {key, "$schema", "$id", "$anchor", "type", *_DEFINITIONS}
    return several or bool(beside)


def _may_be(schema: Mapping[str, Any], kind: str) -> bool:
    types = schema.get("type", kind)
    return kind in types if isinstance(types, list) else types == kind
