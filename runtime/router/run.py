"""The router process: listens, starts replicas, handles signals."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Callable, Coroutine
from typing import Any

import uvicorn

from llmc.runtime.server.draining import DrainingServer, OnStopping
from llmc.runtime.server.errors import ApiError
from llmc.runtime.server.file_limit import raise_file_limit
from llmc.runtime.server.hosts import ANY, LOOPBACK, AllowedHosts, is_loopback
from llmc.runtime.server.http_protocol import bounded_protocol
from llmc.runtime.server.run import ServerError, listen

from .app import RouterApp
from .config import RouterConfig
from .fleet import Fleet
from .metrics import RouterMetrics
from .spawn import Spawner

log = logging.getLogger("llmc.router")
_LOOK_S = 0.05


class _Process(DrainingServer):
    """Drains the router, then ends its local replicas."""

    def __init__(
        self, config: uvicorn.Config, app: RouterApp, spawner: Spawner, drain_timeout_s: float | None, tell: OnStopping
    ) -> None:
        super().__init__(config, drain_timeout_s, tell)
        self._app, self._spawner = app, spawner

    @property
    def num_running(self) -> int:
        return self._app.num_running

    def begin_drain(self) -> asyncio.Task[int]:
        return self._app.begin_drain(self._drain_timeout_s)

    def abandon(self) -> int:
        return self._app.abandon()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Replicas end last, as requests run at them. A second signal then hurries them."""
        await super().shutdown(sockets)
        await self._spawner.close(lambda: self.force_exit)


async def _main(
    config: RouterConfig,
    listener: socket.socket,
    url: str,
    say: Callable[[str], None],
    on_ready: Callable[[str], None],
    on_stopping: OnStopping,
) -> str | None:
    """Returns why it has ended by itself; None after a signal."""
    fleet, metrics = Fleet(config), RouterMetrics()
    spawner = Spawner(fleet, say)
    for one in config.replicas:
        fleet.add(fleet.name_of(one), one)
    for plan in config.spawn:
        spawner.start(plan)
    app = RouterApp(config, fleet, metrics, spawner.update if config.spawn else None)
    hosts = config.allowed_hosts or ((*LOOPBACK, config.host) if is_loopback(config.host) else (ANY,))
    process = _Process(
        uvicorn.Config(
            AllowedHosts(app, hosts),
            http=bounded_protocol(config.client_timeout_s),
            ws="none",
            lifespan="off",
            log_level=config.uvicorn_log_level,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=75,
            backlog=2048,
        ),
        app,
        spawner,
        config.drain_timeout_s,
        on_stopping,
    )

    failure: str | None = None

    async def tell() -> None:
        nonlocal failure
        while not any(replica.ready for replica in fleet.replicas.values()):
            if (failure := spawner.refused) is not None:
                process.stop("a local replica refuses its flags")
                return
            await asyncio.sleep(_LOOK_S)
        on_ready(url)

    async def update() -> None:
        try:
            await spawner.update(None, None)
        except ApiError as error:
            log.warning("SIGHUP: %s", error)

    tasks: set[asyncio.Task[None]] = {asyncio.create_task(tell())}

    def hang_up() -> None:
        if app.stopping:
            return
        task = asyncio.create_task(update())
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    if config.spawn:
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, hang_up)
    try:
        await process.serve(sockets=[listener])
        return failure
    finally:
        for task in list(tasks):
            task.cancel()
        await spawner.close()
        await fleet.close()


def route(
    config: RouterConfig,
    *,
    say: Callable[[str], None],
    on_ready: Callable[[str], None],
    on_stopping: OnStopping | None = None,
) -> None:
    """Routes until a signal. say: gets the lines of local replicas; on_ready: the URL, once a replica is ready;
    on_stopping: the reason for the end.

    Raises ServerError if it cannot listen, or if a local replica refuses its flags before any is ready.
    """
    listener = listen(config.host, config.port)
    try:
        host, port = listener.getsockname()[:2]
        raise_file_limit()
        url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        with contextlib.suppress(KeyboardInterrupt):
            failure = _run(_main(config, listener, url, say, on_ready, on_stopping or (lambda _: None)))
            if failure is not None:
                raise ServerError(failure)
    finally:
        listener.close()


def _run(main: Coroutine[Any, Any, str | None]) -> str | None:
    """Runs on uvloop if installed, as uvicorn does."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(main)
    return uvloop.run(main)
