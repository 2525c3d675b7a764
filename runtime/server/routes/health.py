"""/health, /ready, /version: what probes and load balancers ask."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from fastapi.responses import JSONResponse

from llmc.runtime.binding.handle import version
from llmc.version import __version__

from ..context import ServerContext
from ..errors import DRAINING_RETRY_S

_DRAINING = {"Retry-After": str(DRAINING_RETRY_S), "Connection": "close"}


def router(server: ServerContext) -> APIRouter:
    """The endpoints; none of them needs an API key."""
    routes = APIRouter(tags=["state"])

    @routes.get("/health")
    async def health() -> JSONResponse:
        """200 while the process can serve or will be able to; 503 once it shuts down or the engine has failed."""
        if server.failure is not None:
            return JSONResponse({"status": "failed", "error": server.failure}, 503)
        if server.draining:
            return JSONResponse({"status": "draining"}, 503, _DRAINING)
        return JSONResponse({"status": "ok"})

    @routes.get("/ready")
    async def ready() -> JSONResponse:
        """200 when requests are taken: every graph is warm and the server does not shut down. 503 before and after."""
        if server.failure is not None:
            status = "failed"
        elif server.draining:
            status = "draining"
        else:
            status = "ready" if server.ready else "starting"
        body: dict[str, Any] = {"status": status, "graphs": server.warm_up.coverage()}
        if server.failure is not None:
            body["error"] = server.failure
        headers = {"Retry-After": str(server.warm_up.seconds_left())} if status == "starting" else {}
        if status == "draining":
            headers = _DRAINING
        return JSONResponse(body, 200 if server.ready else 503, headers)

    @routes.get("/version")
    async def versions() -> dict[str, str]:
        """Versions of llmc and of its native library."""
        return {"version": __version__, "native": version()}

    return routes
