"""Local replicas: start, watch, restart, and replace by those of another artifact."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from llmc.runtime.server.errors import ApiError

from .config import SpawnPlan
from .fleet import Fleet
from .replica import Replica
from .served_process import ServedProcess

log = logging.getLogger("llmc.router")
_FIRST_PAUSE_S, _LONGEST_PAUSE_S, _LONG_LIFE_S = 0.1, 10.0, 30.0
_STOP_S = 60.0
_LOOK_S = 0.1


class Local:
    """A serving process that is restarted whenever it ends by itself. say: gets its lines. leaving: a replica of an
    update has taken its place. why: how the last process ended, or why none started. refused: it ended because of its
    command line."""

    def __init__(self, replica: Replica, plan: SpawnPlan, say: Callable[[str], None]) -> None:
        self.replica, self.plan = replica, plan
        self.num_starts = 0
        self.leaving = self.refused = False
        self.why = ""
        self._last_line = ""
        self._say = say
        self._process: ServedProcess | None = None
        self._stopping = False
        self._life = asyncio.create_task(self._live())

    async def stop(self, in_a_hurry: Callable[[], bool] = lambda: False) -> None:
        """Stops the process: it finishes its requests, and is killed if that takes too long. in_a_hurry: as in
        ServedProcess."""
        self._stopping = self.replica.stopping = True
        if self._process is not None:
            await self._process.stop(_STOP_S, in_a_hurry)
        self._life.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._life

    async def _live(self) -> None:
        pause_s = _FIRST_PAUSE_S
        while not self._stopping:
            began = time.monotonic()
            why = await self._run()
            if self._stopping:
                return
            self.why = f"{why}; its last line: {self._last_line}" if self._last_line else why
            self.replica.end_process(self.why)
            log.warning(
                "replica %s %s", self.replica.name, self.why if self.refused else f"is started again: {self.why}"
            )
            pause_s = _FIRST_PAUSE_S if time.monotonic() - began > _LONG_LIFE_S else min(2 * pause_s, _LONGEST_PAUSE_S)
            await asyncio.sleep(pause_s)

    async def _run(self) -> str:
        """One run of the process; returns how it ended, or why it did not start."""
        self.num_starts += 1
        self._last_line = ""
        command = [*self.plan.command, self.plan.artifact]
        self._process = ServedProcess(command, self._hear, self.replica.move, self.plan.environment)
        try:
            await self._process.start()
        except OSError as error:  # of processes, files or memory, there may be enough later
            return f"no process can be started: {error}"
        self.replica.pid = self._process.pid
        why = await self._process.ended()
        self.refused = self._process.refused
        return why

    def _hear(self, line: str) -> None:
        self._last_line = line
        self._say(f"{self.replica.name}: {line}")


class Spawner:
    """All local replicas. say: gets their lines."""

    def __init__(self, fleet: Fleet, say: Callable[[str], None]) -> None:
        self._fleet, self._say = fleet, say
        self._locals: list[Local] = []
        self._numbers = itertools.count()
        self._updating: asyncio.Task[None] | None = None
        self._ending: set[asyncio.Task[None]] = set()

    def start(self, plan: SpawnPlan) -> None:
        """Starts the replicas of one artifact."""
        for _ in range(plan.count):
            self._start_one(plan)

    async def update(self, model: str | None, artifact: str | None) -> dict[str, Any]:
        """Replaces the replicas that serve `model` (None: all) by those of `artifact` (None: what their paths name
        now).

        They are replaced one by one, each new one starting before the old one stops. Returns at once. Raises ApiError.
        """
        if self._updating is not None and not self._updating.done():
            raise ApiError("an update runs: wait for its end", status=409, code="updating")
        staying = [one for one in self._locals if not one.leaving]
        old = [one for one in staying if model is None or model in one.replica.models]
        if not old:
            raise ApiError(f"no local replica serves the model {model!r}", status=404, param="model")
        if artifact is not None and model is None and len({one.plan.artifact for one in old}) > 1:
            raise ApiError("several artifacts are served: name the model to update", param="model")
        if artifact is not None and not Path(artifact).exists():
            raise ApiError(
                f"the artifact {artifact} does not exist: give a path on the router's machine", param="artifact"
            )
        self._updating = asyncio.create_task(self._exchange(old, artifact))
        return {"updating": [one.replica.name for one in old]}

    @property
    def refused(self) -> str | None:
        """Why a replica does not start with its command line; None if each does, as far as is known."""
        return next((f"replica {one.replica.name} {one.why}" for one in self._locals if one.refused), None)

    @property
    def updating(self) -> bool:
        """Whether an update runs."""
        return self._updating is not None and not self._updating.done()

    async def close(self, in_a_hurry: Callable[[], bool] = lambda: False) -> None:
        """Ends all processes. in_a_hurry: as in ServedProcess."""
        tasks = [*self._ending, *([] if self._updating is None else [self._updating])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(one.stop(in_a_hurry) for one in self._locals))
        self._locals.clear()

    def _start_one(self, plan: SpawnPlan) -> Local:
        replica = self._fleet.add(f"r{next(self._numbers)}", None)
        local = Local(replica, plan, self._say)
        self._locals.append(local)
        return local

    async def _exchange(self, old: list[Local], artifact: str | None) -> None:
        ending: list[asyncio.Task[None]] = []
        for one in old:
            plan = one.plan if artifact is None else dataclasses.replace(one.plan, artifact=artifact)
            new = self._start_one(plan)
            if not await self._until_ready(new):
                log.error("the update ends here: %s does not start: %s", new.replica.name, new.why)
                await self._retire(new)
                return
            one.replica.draining = one.leaving = True
            log.info("replica %s takes the place of %s", new.replica.name, one.replica.name)
            task = asyncio.create_task(self._end(one))
            ending.append(task)
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)
        await asyncio.gather(*ending)

    async def _until_ready(self, local: Local) -> bool:
        """Waits until it is ready. False if it ends before: a restart would end the same way."""
        while not local.replica.ready:
            if local.num_starts > 1:
                return False
            await asyncio.sleep(_LOOK_S)
        return True

    async def _end(self, local: Local) -> None:
        await self._fleet.until_idle(local.replica)
        await self._retire(local)

    async def _retire(self, local: Local) -> None:
        await local.stop()
        self._locals.remove(local)
        await self._fleet.remove(local.replica.name)
