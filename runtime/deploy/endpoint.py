"""The router as a Ray Serve application, with replicas from the registry."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Mapping

from starlette.types import Receive, Scope, Send

from llmc.runtime.deploy.registry import BEAT_S, FORGET_S, Place
from llmc.runtime.router.app import RouterApp
from llmc.runtime.router.config import RouterConfig
from llmc.runtime.router.fleet import Fleet
from llmc.runtime.router.metrics import RouterMetrics

log = logging.getLogger("llmc.deploy")
Ask = Callable[[], Awaitable[Mapping[str, Place]]]
"""Returns replicas' places, by name. If it raises, nothing changes."""


class Endpoint:
    """An ASGI application that polls the registry from start-up to shutdown."""

    def __init__(self, config: RouterConfig, ask: Ask) -> None:
        self._config, self._ask = config, ask
        self._app: RouterApp | None = None
        self._fleet: Fleet | None = None
        self._missing: dict[str, float] = {}  # since when the registry has not listed them
        self._following: asyncio.Task[None] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
            return
        assert self._app is not None
        await self._app(scope, receive, send)

    async def _live(self, receive: Receive, send: Send) -> None:
        assert (await receive())["type"] == "lifespan.startup"
        self._fleet = Fleet(self._config)
        self._app = RouterApp(self._config, self._fleet, RouterMetrics(), None)
        self._following = asyncio.create_task(self._follow())
        await send({"type": "lifespan.startup.complete"})
        await receive()
        self._following.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._following
        await self._fleet.close()
        await send({"type": "lifespan.shutdown.complete"})

    async def _follow(self) -> None:
        while True:
            try:
                await self.follow(await self._ask(), time.monotonic())
            except Exception as error:  # the registry is restarting: known replicas stay
                log.warning("the registry does not answer: %s", error)
            await asyncio.sleep(BEAT_S)

    async def follow(self, places: Mapping[str, Place], now: float) -> None:
        """Adds, moves and drains replicas to match the registry at `now`.

        An unlisted replica drains, and is removed when idle. A restarted registry lists nobody for a second, so a
        missing replica drains only after FORGET_S; the router itself checks its health.
        """
        fleet = self._fleet
        assert fleet is not None
        for name, place in places.items():
            self._missing.pop(name, None)
            replica = fleet.replicas.get(name)
            if replica is None:
                replica = fleet.add(name, place.url)
            elif replica.upstream is None or replica.upstream.name != place.url.split("://", 1)[-1].rstrip("/"):
                replica.move(place.url)
            if replica.draining != place.leaving:
                replica.draining = place.leaving
                fleet.changed()
        for name in [name for name in fleet.replicas if name not in places]:
            replica = fleet.replicas[name]
            if now - self._missing.setdefault(name, now) >= FORGET_S:
                replica.draining = True
            if replica.draining and not replica.active:
                del self._missing[name]
                await fleet.remove(name)
