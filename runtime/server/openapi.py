"""The OpenAPI document at /openapi.json: the requests of the routes, and their real answers."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.openapi.utils import get_openapi
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from .context import ServerContext
from .message_errors import PREFIX as MESSAGES
from .openapi_rules import add_rules
from .protocol import response_answers, responses, vector_answers
from .refusals import BEYOND_SCHEMA

_REF = "#/components/schemas/{model}"
_ANSWERS: Mapping[tuple[str, str], type[BaseModel]] = {
    ("post", "/v1/completions"): responses.CompletionAnswer,
    ("post", "/v1/chat/completions"): responses.ChatAnswer,
    ("post", "/v1/responses"): response_answers.ResponseAnswer,
    ("get", "/v1/responses/{response_id}"): response_answers.ResponseAnswer,
    ("delete", "/v1/responses/{response_id}"): response_answers.ResponseDeleted,
    ("get", "/v1/responses/{response_id}/input_items"): response_answers.InputItems,
    ("post", "/v1/messages"): response_answers.MessageAnswer,
    ("post", "/v1/messages/count_tokens"): response_answers.TokenCount,
    ("post", "/v1/embeddings"): vector_answers.EmbeddingAnswer,
    ("post", "/v1/rerank"): vector_answers.RerankAnswer,
    ("post", "/v1/score"): vector_answers.ScoreAnswer,
    ("post", "/classify"): vector_answers.ClassifyAnswer,
    ("get", "/v1/models"): responses.ModelList,
    ("get", "/v1/models/{model_id}"): responses.Model,
    ("post", "/tokenize"): responses.TokenizeAnswer,
    ("post", "/detokenize"): responses.DetokenizeAnswer,
    ("get", "/health"): responses.Health,
    ("get", "/ready"): responses.Readiness,
    ("get", "/version"): responses.Versions,
}
_STREAMS = frozenset({"/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"})
_BEYOND = "; ".join(f"{code}: {why}" for code, why in BEYOND_SCHEMA.items())
_ERRORS = {
    400: "The request is malformed or asks for what the model cannot do. One that this document allows may still be "
    f"refused for what no schema can say, with a code of these. {_BEYOND}.",
    404: "There is no such model.",
    408: "The request took longer to arrive, or to be answered, than it may.",
    413: "The body is larger than --max-body-size, or the request may take more memory than --request-memory.",
    415: "The content type is not JSON, or the body is packed (Content-Encoding).",
    429: "The queue or the memory for requests is full; Retry-After says when to try again.",
    500: "The engine failed the request.",
    503: "The server starts, drains or has failed.",
}
_EVENT = {
    "type": "object",
    "description": "A server-sent event: a chunk of the answer as JSON, or [DONE]; sent when stream is true.",
    "required": ["data"],
    "properties": {"data": {"type": "string"}},
}


def install(app: FastAPI, server: ServerContext) -> None:
    """Makes `app`, which has no route of FastAPI's own for it, serve this document. app.openapi makes it once, for
    callers in any thread."""
    made: dict[str, Any] = {}
    lock = threading.Lock()

    def openapi() -> dict[str, Any]:
        with lock:
            if not made:
                made.update(_document(app, server))
        return made

    async def serve(request: Request) -> JSONResponse:
        # Its making takes a second, for which all streams would wait.
        return JSONResponse(await asyncio.to_thread(app.openapi))

    app.openapi = openapi  # type: ignore[method-assign]
    app.add_route("/openapi.json", serve, include_in_schema=False)


def _document(app: FastAPI, server: ServerContext) -> dict[str, Any]:
    document = describe(app)
    add_rules(document["components"]["schemas"], server)
    if server.config.api_keys:
        document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{"key": []}]
    return document


def describe(app: FastAPI) -> dict[str, Any]:
    """The document of the routes that `app` has, without what depends on the served model."""
    document = get_openapi(title=app.title, version=app.version, routes=app.routes)
    errors: list[type[BaseModel]] = [responses.ErrorAnswer, response_answers.MessageErrorAnswer]
    models = list(dict.fromkeys([*errors, *_ANSWERS.values()]))
    _, definitions = models_json_schema([(model, "serialization") for model in models], ref_template=_REF)
    schemas = document.setdefault("components", {}).setdefault("schemas", {})
    assert not schemas.keys() & definitions["$defs"].keys(), "a part of a request has the name of a part of an answer"
    schemas.update(definitions["$defs"])
    # FastAPI's own shape of a refused body; errors.py replaces it.
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            asks = any(one["in"] == "query" for one in operation.get("parameters", ()))
            operation["responses"] = _responses(method, path, asks=asks)
    return document


def _responses(method: str, path: str, *, asks: bool) -> dict[str, Any]:
    """asks: whether the operation has query parameters."""
    model = _ANSWERS.get((method, path))
    if path in ("/metrics", "/v1/load_lora_adapter", "/v1/unload_lora_adapter"):
        content: dict[str, Any] = {"text/plain": {"schema": {"type": "string"}}}
    else:
        content = {"application/json": {"schema": _schema(model) if model else {"type": "object"}}}
    if path in _STREAMS:
        content["text/event-stream"] = {"schema": _EVENT}
    answers: dict[str, Any] = {"200": {"description": "Success.", "content": content}}
    if path in ("/health", "/ready"):
        answers["503"] = {"description": _ERRORS[503], "content": content}
        return answers
    error = response_answers.MessageErrorAnswer if path.startswith(MESSAGES) else responses.ErrorAnswer
    refused = {"application/json": {"schema": _schema(error)}}
    statuses = [401, *_ERRORS] if method == "post" else [401, 404]
    if method == "get" and (path.startswith("/v1/responses/") or asks):
        statuses = [400, *statuses]
    if path in ("/start_profile", "/stop_profile"):
        answers["409"] = {"description": "A profile is being taken already, or none is.", "content": refused}
    for status in statuses:
        text = _ERRORS.get(status, "No valid API key was sent.")
        answers[str(status)] = {"description": text, "content": refused}
    return answers


def _schema(model: type[BaseModel]) -> dict[str, str]:
    return {"$ref": _REF.format(model=model.__name__)}
