"""A replica on a node: a process of `llmc serve`, started, watched and stopped by its Ray actor."""

from __future__ import annotations

import asyncio
import logging
import re
from collections import deque
from collections.abc import Awaitable, Callable, Sequence

from llmc.runtime.deploy.registry import BEAT_S
from llmc.runtime.router.exhausted import RouterExhausted
from llmc.runtime.router.served_process import SERVE, ServedProcess, without_access_log
from llmc.runtime.router.upstream import ReplicaLost, Upstream
from llmc.runtime.server.hand_over_headers import KEY_ENV

log = logging.getLogger("llmc.deploy")
_LAST_LINES = 5
_GAUGE = re.compile(rb"^(llmc_(?:sequences_running|sequences_waiting|kv_blocks|kv_blocks_used)) (\S+)$", re.MULTILINE)
Beat = Callable[[str, bool], Awaitable[None]]
"""Reports the URL, and whether the replica is leaving."""


class ServerDied(RuntimeError):
    """The process ended by itself; the message has its last lines."""


class Server:
    """The process, from start to end. key: the API key it requires, if any. hand_over_key: of a server with a role."""

    def __init__(
        self, artifact: str, flags: Sequence[str], host: str, key: str | None, hand_over_key: str | None = None
    ) -> None:
        self.url: str | None = None
        self._headers = [] if key is None else [(b"authorization", b"Bearer " + key.encode())]
        command = [*SERVE, artifact, "--host", host, "--port", "0", *without_access_log(flags), *flags]
        environment = {} if hand_over_key is None else {KEY_ENV: hand_over_key}
        self.process = ServedProcess(command, self._hear, self._found, environment)
        self._load = {"load": 0.0, "kv_use": 0.0}
        self._started = False
        self._how_it_ended: str | None = None
        self._known = asyncio.Event()  # that it is ready, or has ended
        self._lines: deque[str] = deque(maxlen=_LAST_LINES)
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self, beat: Beat) -> None:
        """Returns when it is ready; from then on reports through `beat`. Further calls only wait. Raises ServerDied."""
        if not self._started:
            self._started = True
            try:
                await self.process.start()
            except (OSError, ValueError) as error:  # no process to be had, or a flag that no process can get
                self._how_it_ended = f"could not be started: {error}"
                self._known.set()
            else:
                self._tasks.append(asyncio.create_task(self._follow()))
        await self._known.wait()
        self.check()
        assert self.url is not None
        if len(self._tasks) == 1:
            self._tasks.append(asyncio.create_task(self._beat(beat, self.url)))

    def check(self) -> None:
        """Raises ServerDied if it has ended."""
        if self._how_it_ended is not None:
            lines = " / ".join(self._lines)
            raise ServerDied(f"llmc serve: {self._how_it_ended}{': ' if lines else ''}{lines}")

    async def load(self) -> dict[str, float]:
        """Inputs of scaling: `load`, running and waiting requests; `kv_use`, share of KV blocks in use.

        A process that does not answer in time keeps its last load, as it may be busy.
        """
        if self.url is None or self._how_it_ended is not None:
            return {"load": 0.0, "kv_use": 0.0}
        try:
            answer = await Upstream(self.url).request("GET", b"/metrics", self._headers, b"")
            try:
                found = {name.decode(): float(value) for name, value in _GAUGE.findall(await answer.body())}
            finally:
                answer.close()
        except (ReplicaLost, RouterExhausted):
            return self._load
        running, waiting = (found.get(f"llmc_sequences_{state}", 0.0) for state in ("running", "waiting"))
        blocks, used = (found.get(name, 0.0) for name in ("llmc_kv_blocks", "llmc_kv_blocks_used"))
        self._load = {"load": running + waiting, "kv_use": used / max(blocks, 1.0)}
        return self._load

    async def stop(self, beat: Beat, most_s: float) -> None:
        """Informs endpoints, lets running requests finish within most_s, then kills the process."""
        if self.url is not None:
            await beat(self.url, True)
            # Endpoints that have just polled will poll again.
            await asyncio.sleep(2 * BEAT_S)
        for task in self._tasks[1:]:
            task.cancel()
        await self.process.stop(most_s)
        for task in self._tasks:
            task.cancel()

    def _hear(self, line: str) -> None:
        self._lines.append(line)
        log.info("%s", line)

    def _found(self, url: str) -> None:
        self.url = url
        self._known.set()

    async def _follow(self) -> None:
        self._how_it_ended = await self.process.ended()
        self._known.set()

    async def _beat(self, beat: Beat, url: str) -> None:
        while self._how_it_ended is None:
            try:
                await beat(url, False)
            except Exception as error:  # the registry is restarting
                log.warning("the registry does not answer: %s", error)
            await asyncio.sleep(BEAT_S)
