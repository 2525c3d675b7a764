"""The endpoints, one family a file; each has `router(server) -> APIRouter`."""

from __future__ import annotations

from fastapi import FastAPI

from ..context import ServerContext
from . import chat, completions, debug, health, messages, models, responses, tokenize


def add_routes(app: FastAPI, server: ServerContext) -> None:
    """Adds every endpoint."""
    for family in (completions, chat, responses, messages, models, tokenize, health):
        app.include_router(family.router(server))
    if server.config.debug_endpoints:
        app.include_router(debug.router(server))
