"""/metrics: for Prometheus."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import Response

from ..metrics import ServerMetrics


def router(metrics: ServerMetrics) -> APIRouter:
    """The endpoint."""
    routes = APIRouter(tags=["state"])

    @routes.get("/metrics")
    async def scrape(request: Request) -> Response:
        """The metrics in Prometheus' text form, or OpenMetrics when the Accept header asks for it."""
        content, content_type = metrics.render(request.headers.get("accept", ""))
        return Response(content, headers={"Content-Type": content_type})

    return routes
