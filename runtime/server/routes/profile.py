"""/start_profile and /stop_profile: a trace of the engine's steps. Only with --profiler-dir."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter

from ..errors import ApiError
from ..profiler import Profiler, ProfilerBusy


def router(profiler: Profiler) -> APIRouter:
    """The endpoints; they need an API key where the others do."""
    routes = APIRouter(tags=["debug"])

    @routes.post("/start_profile")
    async def start_profile() -> dict[str, str]:
        """Begins a profile; 409 while there is one."""
        try:
            profiler.start()
        except ProfilerBusy as error:
            raise ApiError(str(error), status=409, code="profiler_busy") from error
        return {"status": "profiling"}

    @routes.post("/stop_profile")
    async def stop_profile() -> dict[str, Any]:
        """Ends the profile and writes it into --profiler-dir; 409 when there is none."""
        try:
            return await asyncio.to_thread(profiler.stop)
        except ProfilerBusy as error:
            raise ApiError(str(error), status=409, code="profiler_busy") from error
        except OSError as error:
            raise ApiError(
                f"the profile cannot be written: {error}; check --profiler-dir", status=500, code="profiler_failed"
            ) from error

    return routes
