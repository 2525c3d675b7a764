"""The endpoints, one family a file; each has `router(server) -> APIRouter`."""

from __future__ import annotations

from fastapi import FastAPI

from ..context import ServerContext
from . import health, models


def add_routes(app: FastAPI, server: ServerContext) -> None:
    """Adds every endpoint."""
    for family in (health, models):
        app.include_router(family.router(server))
