"""Constraints on a request's output: response_format, structured_outputs and the guided_ fields."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from llmc.runtime.guided.constraint import Guided
from llmc.runtime.guided.schema_defaults import SchemaDefaults
from llmc.runtime.request_error import RequestError
from llmc.runtime.server.errors import ApiError
from llmc.runtime.server.protocol.common import SamplingFields
from llmc.runtime.server.refusals import CONFLICT, CONSTRAINT
from llmc.runtime.server.structural_tags import structural_tag

_MAKERS: Mapping[str, Callable[[Any, SchemaDefaults], Guided | None]] = {
    "json": lambda schema, defaults: Guided.json_schema(schema, defaults=defaults),
    "regex": lambda pattern, _: Guided.regex(pattern),
    "choice": lambda choices, _: Guided.choice(choices),
    "grammar": lambda text, _: Guided.grammar(text),
    "json_object": lambda wanted, defaults: Guided.json_object(defaults) if wanted else None,
    "structural_tag": structural_tag,
}
# vLLM's name for per-request schema defaults.
_CLOSED = "disable_additional_properties"


def guided_of(request: SamplingFields, defaults: SchemaDefaults) -> Guided | None:
    """The constraint of a request, None for none. defaults: for its schemas. Raises ApiError, also for more than one
    constraint."""
    given = dict(request.structured_outputs or {})
    closed = given.pop(_CLOSED, None)
    if closed is not None:
        defaults = replace(defaults, additional_properties=not closed)
    asked: dict[str, Callable[[], Guided | None]] = {}
    for kind in ("json", "regex", "choice", "grammar"):
        value = getattr(request, f"guided_{kind}")
        if value is not None:
            asked[f"guided_{kind}"] = partial(_MAKERS[kind], value, defaults)
    for kind, value in given.items():
        if value is not None:
            asked[f"structured_outputs.{kind}"] = partial(_MAKERS[kind], value, defaults)
    if request.response_format is not None:
        asked["response_format"] = partial(_response_format, request.response_format, defaults)
    made: dict[str, Guided] = {}
    for name, make in asked.items():
        try:
            guided = make()
        except RequestError as error:
            raise ApiError(f"{name}: {error}", param=name, code=CONSTRAINT) from error
        if guided is not None:
            made[name] = guided
    if len(made) > 1:
        names = list(made)
        raise ApiError(f"{' and '.join(names)} exclude each other: give one", param=names[0], code=CONFLICT)
    return next(iter(made.values()), None)


def _response_format(form: Mapping[str, Any], defaults: SchemaDefaults) -> Guided | None:
    kind = form["type"]
    if kind == "text":
        return None
    if kind == "structural_tag":
        return structural_tag(form, defaults)
    described = form["json_schema"] if kind == "json_schema" else {}
    schema = described.get("schema")
    if schema is None:
        return Guided.json_object(defaults)
    return Guided.json_schema(schema, strict=described.get("strict") is True, defaults=defaults)
