"""Types of a JSON schema in a few words, for a cell of a table."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from .markdown import code

_REF = "#/components/schemas/"


def shown_type(schema: Mapping[str, Any]) -> str:
    """`integer`, 0 … 20, or a list of [Part](#Part): Markdown of what values a schema takes."""
    if "$ref" in schema:
        name = schema["$ref"].removeprefix(_REF)
        return f"[{name}](#{name})"
    for key in ("anyOf", "oneOf"):
        if key in schema:
            forms = (shown_type(form) for form in schema[key])
            return " or ".join(form for form in dict.fromkeys(forms) if form)
    if "const" in schema:
        return code(json.dumps(schema["const"]))
    if "enum" in schema:
        if not any(schema["enum"]) and len(schema["enum"]) > 1:
            return "refused unless empty"
        return ", ".join(code(json.dumps(value)) for value in schema["enum"])
    kind = schema.get("type")
    if kind == "array":
        items = shown_type(schema.get("items", {}))
        listed = f"list{_count(schema, 'Items')}"
        return f"{listed}: ({items})" if items else listed
    if kind == "object":
        values = schema.get("additionalProperties")
        of = shown_type(values) if isinstance(values, Mapping) else ""
        return f"object: ({of})" if of else "object"
    if isinstance(kind, list):
        return " or ".join(kind)
    if kind == "string":
        count = _count(schema, "Length")
        return f"string{count} characters" if count else "string"
    return f"{kind}{_bounds(schema)}" if kind else ""


def fields(schema: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The named fields of an object."""
    yield from schema.get("properties", {}).items()


def _bounds(schema: Mapping[str, Any]) -> str:
    said = [
        f"{word} {schema[key]:.15g}"
        for key, word in (
            ("minimum", "from"),
            ("exclusiveMinimum", "above"),
            ("maximum", "to"),
            ("exclusiveMaximum", "below"),
        )
        if key in schema
    ]
    return "".join(f" {one}" for one in said)


def _count(schema: Mapping[str, Any], of: str) -> str:
    """How many there may be, as in " of 1 or more"."""
    least, most = schema.get(f"min{of}"), schema.get(f"max{of}")
    if least is None and most is None:
        return ""
    if most is None:
        return f" of {least} or more"
    return f" of up to {most}" if least is None else f" of {least} to {most}"
