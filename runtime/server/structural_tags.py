"""Structural tags: free text in which each trigger must begin a tag around JSON of a given schema."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llmc.runtime.guided.constraint import Guided, lark_text, parse_json, schema_text
from llmc.runtime.guided.schema_defaults import SchemaDefaults
from llmc.runtime.request_error import RequestError

MAX_TAGS = 128
_JSON_SCHEMA = SchemaDefaults()
_EXAMPLE = '{"triggers": ["<f="], "structures": [{"begin": "<f=x>", "schema": {…}, "end": "</f>"}]}'


def structural_tag(value: Any, defaults: SchemaDefaults = _JSON_SCHEMA) -> Guided:
    """The constraint of vLLM's `structural_tag`, an object or its JSON text. Raises RequestError.

    The older form has `structures` and `triggers`, the newer one a `format`. Of that, only the type triggered_tags is
    supported, with tags that contain a json_schema. Triggers and tags are text without special tokens.
    """
    given = parse_json("the structural tag", value) if isinstance(value, str) else value
    form = given.get("format") if isinstance(given, Mapping) else None
    if isinstance(form, Mapping) and form.get("type") == "triggered_tags":
        tags, once, needed = form.get("tags"), form.get("stop_after_first"), form.get("at_least_one")
        structures = [_older(tag) for tag in tags] if isinstance(tags, list) else None
        return _guided(structures, form.get("triggers"), _REPEATS[bool(once), bool(needed)], defaults)
    if form is not None or not isinstance(given, Mapping):
        raise RequestError(f"the structural tag has no form that is supported: give {_EXAMPLE}")
    return _guided(given.get("structures"), given.get("triggers"), "*", defaults)


# (stop_after_first, at_least_one) → number of tags.
_REPEATS = {(False, False): "*", (False, True): "+", (True, False): "?", (True, True): ""}


def _older(tag: Any) -> Any:
    """A tag of the newer form converted to a structure of the older one. Anything else is returned unchanged, to be
    refused."""
    content = tag.get("content") if isinstance(tag, Mapping) else None
    if not isinstance(content, Mapping) or content.get("type") != "json_schema":
        return None
    return {"begin": tag.get("begin"), "schema": content.get("json_schema"), "end": tag.get("end")}


def _guided(structures: Any, triggers: Any, repeat: str, defaults: SchemaDefaults) -> Guided:
    if not _texts(triggers) or not isinstance(structures, list) or not 0 < len(structures) <= MAX_TAGS:
        raise RequestError(
            f"the structural tag lacks its lists of at most {MAX_TAGS} tags and triggers: give {_EXAMPLE}"
        )
    if len(triggers) > MAX_TAGS:
        raise RequestError(f"the structural tag has {len(triggers)} triggers: give at most {MAX_TAGS}")
    rules = [f"lead_{index}[lazy]: TEXT {lark_text(trigger)}" for index, trigger in enumerate(triggers)]
    parts = []
    for index, structure in enumerate(structures):
        begin, schema, end = (
            (structure.get(name) for name in ("begin", "schema", "end"))
            if isinstance(structure, Mapping)
            else (None, None, None)
        )
        if not isinstance(begin, str) or not isinstance(end, str) or not isinstance(schema, Mapping):
            raise RequestError(f"tag {index} of the structural tag lacks begin, schema or end: give {_EXAMPLE}")
        lead = next((number for number, trigger in enumerate(triggers) if begin.startswith(trigger)), None)
        if lead is None:
            raise RequestError(f"tag {index} of the structural tag begins with none of the triggers: add one")
        what = f"tag {index}"
        json_term = f"%json {schema_text(f'the schema of {what}', schema, strict=False, defaults=defaults)}"
        rest = [begin[len(triggers[lead]) :], json_term, end]
        terms = [text if text is json_term else lark_text(text) for text in rest if text]
        rules.append(f"tag_{index}: lead_{lead} {' '.join(terms)}")
        parts.append((what, Guided.json_schema(schema, strict=False, defaults=defaults)))
    choice = " | ".join(f"tag_{index}" for index in range(len(structures)))
    return Guided.lark(
        "structural_tag", "\n".join([f"start: ({choice}){repeat} TEXT", r"TEXT: /(.|\n)*/", *rules]), parts
    )


def _texts(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, str) and item for item in value)
