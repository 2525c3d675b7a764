"""The life of the serving process after its start."""

from __future__ import annotations

import asyncio

import uvicorn
from fastapi import FastAPI

from .config import ServerConfig
from .context import ServerContext
from .draining import DrainingServer, OnStopping
from .http_protocol import bounded_protocol

_KEEP_ALIVE_S = 75
BACKLOG = 2048


class ServerProcess(DrainingServer):
    """Drains the engine of `server`. tls: uvicorn's arguments for it."""

    def __init__(
        self, app: FastAPI, server: ServerContext, config: ServerConfig, tls: dict[str, str], tell: OnStopping
    ) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=bounded_protocol(config.client_timeout_s),
                ws="none",
                log_level=config.uvicorn_log_level,
                access_log=False,
                server_header=False,
                timeout_keep_alive=_KEEP_ALIVE_S,
                backlog=BACKLOG,
                ssl_keyfile=tls.get("keyfile"),
                ssl_certfile=tls.get("certfile"),
            ),
            config.drain_timeout_s,
            tell,
        )
        self._server = server

    @property
    def num_running(self) -> int:
        return self._server.engine.num_active

    def begin_drain(self) -> asyncio.Task[int]:
        return self._server.begin_drain()

    def abandon(self) -> int:
        return self._server.engine.abandon()
