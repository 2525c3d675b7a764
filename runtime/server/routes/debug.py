"""/debug/engine: is the engine whole, and what does it hold? Only with --debug-endpoints."""

from __future__ import annotations

import dataclasses
from typing import Any

from fastapi import APIRouter

from ..context import ServerContext


def router(server: ServerContext) -> APIRouter:
    """The endpoint; it needs an API key where the others do."""
    routes = APIRouter(tags=["debug"])

    @routes.get("/debug/engine")
    async def engine() -> dict[str, Any]:
        """integrity: what is wrong with the block tables, else null; streams: requests that the server holds."""
        wrong = await server.engine.check_integrity()
        stats = dataclasses.asdict(server.engine.stats())
        return {"integrity": wrong, "streams": server.engine.num_active, "stats": stats}

    return routes
