"""The HTTP reference: every route with its fields and statuses, from the document that the server gives of itself."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from fastapi import FastAPI

from llmc import __version__
from llmc.runtime.server.config import ServerConfig
from llmc.runtime.server.openapi import describe
from llmc.runtime.server.routes import add_routes, metrics, profile, replan
from llmc.runtime.server.routes import page as live_page

from .markdown import cell, code, heading, table
from .schema_types import fields, shown_type

_TITLES: Mapping[str, str] = {
    "chat": "Chat",
    "completions": "Completions",
    "responses": "Responses",
    "messages": "Messages",
    "vectors": "Vectors and scores",
    "models": "Models",
    "tokenizer": "Tokens",
    "state": "State",
    "page": "Live page",
    "debug": "Debugging",
}
_INTRODUCTION = """# HTTP

What `llmc serve` answers. [Serving](../serving.md) says what the parameters do. A running server gives the same facts
to programs, as an OpenAPI document at `/openapi.json`, with the limits of the served model.

- `null` means that a field is not given.
- An error is an [ErrorAnswer](#ErrorAnswer), or a [MessageErrorAnswer](#MessageErrorAnswer) under `/v1/messages`.
- With `--api-key` a request needs the header `Authorization: Bearer KEY` or `X-Api-Key: KEY`; `/health`, `/ready` and
  `/version` do not."""


def document() -> dict[str, Any]:
    """The OpenAPI document of all routes, those of flags included, without a model."""
    app = FastAPI(title="llmc", version=__version__)
    # Routes keep their server for the requests that come, and none comes.
    config = ServerConfig(artifact=Path(), served_model_names=("model",), debug_endpoints=True, allow_runtime_lora=True)
    server: Any = SimpleNamespace(config=config, lanes=SimpleNamespace(bodies=None))
    observer: Any = None
    add_routes(app, server)
    for router in (metrics.router, profile.router, replan.router):
        app.include_router(router(observer))
    app.include_router(live_page.router(observer, observer))
    return describe(app)


def page(described: Mapping[str, Any] | None = None) -> str:
    """The page, in Markdown. described: the document, where it is made already."""
    described = document() if described is None else described
    routes: dict[str, list[str]] = {tag: [] for tag in _TITLES}  # others, unless they get a title, come behind these
    for path, methods in described["paths"].items():
        for method, operation in methods.items():
            (tag,) = operation["tags"]
            routes.setdefault(tag, []).extend([heading(3, f"{method.upper()} {path}"), *_route(operation)])
    parts = [_INTRODUCTION]
    for tag, of_tag in routes.items():
        parts += [heading(2, _TITLES.get(tag, tag.capitalize())), *of_tag]
    parts += [heading(2, "Statuses"), *_statuses(described), heading(2, "Objects")]
    for name, schema in described["components"]["schemas"].items():
        parts += [heading(3, name, anchor=name), *_object(schema)]
    return "\n\n".join(parts) + "\n"


def _route(operation: Mapping[str, Any]) -> Iterator[str]:
    yield cell(operation["description"])
    parameters = [
        [code(one["name"]), one["in"], shown_type(one["schema"]), "required" if one.get("required") else ""]
        for one in operation.get("parameters", ())
        if one["in"] != "header"
    ]
    if parameters:
        yield table(["parameter", "in", "type", ""], parameters)
    answers = operation["responses"]
    taken = _json_schema(operation.get("requestBody", {}))
    given = _json_schema(answers["200"])
    lines = [f"Request: {shown_type(taken)}"] if taken else []
    if given and "$ref" in given:
        stream = ", or a stream of server-sent events" if "text/event-stream" in answers["200"]["content"] else ""
        lines.append(f"Answer: {shown_type(given)}{stream}")
    lines.append("Statuses: " + ", ".join(code(status) for status in sorted(answers)))
    yield "\n".join(f"- {line}" for line in lines)


def _json_schema(message: Mapping[str, Any]) -> Mapping[str, Any]:
    schema: Mapping[str, Any] = message.get("content", {}).get("application/json", {}).get("schema", {})
    return schema


def _statuses(described: Mapping[str, Any]) -> Iterator[str]:
    """A line for each meaning of a status."""
    meanings = {
        (status, answer["description"])
        for methods in described["paths"].values()
        for operation in methods.values()
        for status, answer in operation["responses"].items()
    }
    yield table(["status", "meaning"], [[code(status), cell(meaning)] for status, meaning in sorted(meanings)])


def _object(schema: Mapping[str, Any]) -> Iterator[str]:
    if schema.get("description"):
        yield cell(schema["description"])
    rows = [
        [code(name), shown_type(of), "required" if name in schema.get("required", ()) else _default(of)]
        for name, of in fields(schema)
    ]
    yield table(["field", "type", "default"], rows) if rows else shown_type(schema)


def _default(schema: Mapping[str, Any]) -> str:
    default = schema.get("default")
    return "" if default is None else code(json.dumps(default))
