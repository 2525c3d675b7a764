"""The endpoints, one family a file; each has `router(server) -> APIRouter`."""

from __future__ import annotations

from fastapi import FastAPI

from ..context import ServerContext
from . import (
    adapters,
    blocks,
    chat,
    completions,
    debug,
    embeddings,
    health,
    messages,
    models,
    responses,
    scores,
    tokenize,
)


def add_routes(app: FastAPI, server: ServerContext) -> None:
    """Adds every endpoint."""
    for family in (completions, chat, responses, messages, embeddings, scores, models, tokenize, health):
        app.include_router(family.router(server))
    if server.config.allow_runtime_lora:
        app.include_router(adapters.router(server))
    if server.config.hand_over_key is not None and server.hand_over.sends:
        app.include_router(blocks.router(server))
    if server.config.debug_endpoints:
        app.include_router(debug.router(server))
