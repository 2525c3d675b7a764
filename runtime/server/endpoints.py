"""Errors for a path without endpoint, and for a method that an endpoint does not accept."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

import fastapi.routing
from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException

from .errors import ApiError

_SHOWN_CHARS = 80


def install(app: FastAPI) -> None:
    """Makes `app` list its endpoints when none matches. Errors raised by a route stay as they are."""

    async def handle(request: Request, error: Exception) -> Any:
        assert isinstance(error, HTTPException)
        paths = documented(app)
        if error.status_code == 404:
            return no_endpoint(paths, request.url.path).response()
        return wrong_method(paths, request.method, request.url.path, error.headers or {}).response()

    for status in (404, 405):
        app.add_exception_handler(status, handle)


def documented(app: FastAPI) -> dict[str, set[str]]:
    """The methods of every path in the OpenAPI document; without the document, which takes a second."""
    # Newer releases of FastAPI keep the routes of an included router with the router.
    each: Any = getattr(fastapi.routing, "iter_route_contexts", iter)
    found: dict[str, set[str]] = {}
    for route in each(app.routes):
        if getattr(route, "include_in_schema", False):
            found.setdefault(route.path_format, set()).update(route.methods)
    return found


def no_endpoint(paths: Iterable[str], path: str) -> ApiError:
    """A 404 that lists the endpoints, those nearest to `path` first."""
    nearest = sorted(paths, key=lambda known: (-_likeness(path, known), known))
    message = f"there is no endpoint {_shown(path)}: use one of {', '.join(nearest)}"
    return ApiError(message, status=404, code="unknown_endpoint")


def wrong_method(paths: Mapping[str, Iterable[str]], method: str, path: str, headers: Mapping[str, str]) -> ApiError:
    """A 405 that lists the methods of all routes of the path, in the text and in the header Allow.

    headers: those of the framework's answer, which knows the methods of one route only.
    """
    known = {name for template, of in paths.items() if _matches(template, path) for name in of}
    allowed = ", ".join(sorted(known)) or headers.get("Allow", "")
    message = f"{_shown(path)} does not take {_shown(method)}: use {allowed}"
    also = ", HEAD" if "GET" in known else ""
    return ApiError(message, status=405, code="method_not_allowed", headers={**headers, "Allow": allowed + also})


def _matches(template: str, path: str) -> bool:
    """Whether `path` matches a path template of the document, such as /v1/models/{model_id}."""
    wanted, given = template.split("/"), path.split("/")
    same = (part == name or (part.startswith("{") and name != "") for part, name in zip(wanted, given, strict=False))
    return len(wanted) == len(given) and all(same)


def _likeness(path: str, known: str) -> float:
    """Similarity of two paths, 0 … 1; a missing prefix, such as /v1, counts little."""
    whole = difflib.SequenceMatcher(None, path[:256], known).ratio()
    ending = difflib.SequenceMatcher(None, path[:256], known.removeprefix("/v1")).ratio()
    return max(whole, ending - 0.01)


def _shown(text: str) -> str:
    return ascii(text if len(text) <= _SHOWN_CHARS else text[: _SHOWN_CHARS - 3] + "...")[1:-1]
