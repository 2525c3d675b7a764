"""/v1/llmc/replan: what this server would do about its buckets, and did. Only with --replan suggest or auto."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter, Query

from llmc.runtime.replan.replanner import Replanner


def router(replanner: Replanner) -> APIRouter:
    """The endpoint; it needs an API key where the others do."""
    routes = APIRouter(tags=["state"])

    @routes.get("/v1/llmc/replan")
    async def replan(steps: bool = Query(False, description="With the histogram of steps.")) -> dict[str, Any]:
        """The last proposal, what is on trial, the last decisions with their reasons, and the shapes that came most."""
        return await asyncio.to_thread(replanner.state, steps=steps)

    return routes
