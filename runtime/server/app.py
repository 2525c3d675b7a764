"""The HTTP application: middleware, and the server's life from warm-up to drain."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI

from llmc.runtime.warm_up.warm_up import OnWarmStep, WarmPlan
from llmc.version import __version__

from . import endpoints, errors, message_errors, observers, openapi, security
from .async_engine import AsyncEngine
from .config import ServerConfig
from .context import ServerContext
from .head_requests import HeadRequests
from .routes import add_routes
from .trailing_slash import TrailingSlash


def create_app(
    config: ServerConfig,
    engine: AsyncEngine,
    on_warm_step: OnWarmStep | None = None,
    warm_plan: WarmPlan | None = None,
) -> FastAPI:
    """The application that serves `engine` and closes it at the end. `app.state.server` is its ServerContext.

    After start-up the engine is warmed in the background by warm_plan (None: all graphs). Until its hot graphs are
    warm, requests get a 503.
    """
    server = ServerContext(config, engine, on_warm_step, warm_plan)
    watching = observers.Observers(server)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        watching.start()
        await server.start()
        try:
            yield
        finally:
            await server.stop()
            watching.close()

    # FastAPI's documentation pages load foreign scripts; openapi.install serves tools.
    app = FastAPI(title="llmc", version=__version__, lifespan=lifespan, openapi_url=None, redirect_slashes=False)
    app.state.server = server
    errors.install(app)
    endpoints.install(app)
    add_routes(app, server)
    app.add_middleware(HeadRequests)
    security.install(app, config, server.memory)
    message_errors.install(app)
    app.add_middleware(TrailingSlash)
    watching.install(app)
    openapi.install(app, server)
    return app
