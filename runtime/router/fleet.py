"""All replicas: which one gets a request, which requests wait while all are full, and how replicas are replaced."""

from __future__ import annotations

import asyncio
import contextlib
import math
import secrets
import time
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from llmc.runtime.address import Address
from llmc.runtime.server.errors import ApiError

from .config import RouterConfig
from .prefixes import PrefixTable, Ring
from .replica import Replica

Excluded = set[tuple[str, int]]
"""Replicas, by name and epoch, that a request must not be given to."""
_LOOK_S = 0.25


class Fleet:
    """All replicas; lives on the event loop. Whoever adds a replica has it watched until it is removed.

    router_id: of this router, by which it knows its own requests.
    """

    def __init__(self, config: RouterConfig) -> None:
        self.config = config
        self.router_id = secrets.token_hex(8)
        self.replicas: dict[str, Replica] = {}
        self.num_waiting = 0
        self._watches: dict[str, asyncio.Task[None]] = {}
        self._prefixes = PrefixTable()
        self._ring = Ring(())
        self._waiters: dict[str | None, deque[asyncio.Future[None]]] = {}  # by model, first come first served
        self._pinned: dict[str, int] = {}  # running streams by artifact

    def add(self, name: str, url: str | None) -> Replica:
        """Adds a replica that gets requests once it is ready. url None: its address follows by `move`. Raises
        UrlError."""
        replica = Replica(name, url, self.config.replica_key, self._has_room, self.changed, self.router_id)
        self.replicas[name] = replica
        self._ring = Ring(self.replicas)
        watch = replica.watch(self.config.health_interval_s, self.config.health_timeout_s)
        self._watches[name] = asyncio.create_task(watch)
        return replica

    @staticmethod
    def name_of(url: str) -> str:
        """The name of a replica at an address, however that is written. Raises UrlError."""
        address = Address.parse(url)
        return address.authority + address.prefix

    async def remove(self, name: str) -> None:
        """Removes a replica that has no requests left."""
        replica = self.replicas.pop(name)
        self._ring = Ring(self.replicas)
        watch = self._watches.pop(name)
        watch.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watch
        if replica.upstream is not None:
            replica.upstream.abort_all()

    async def close(self) -> None:
        """Removes all replicas."""
        for name in list(self.replicas):
            await self.remove(name)

    def default_model(self) -> str | None:
        """Model for requests that name none: the first model of the first replica."""
        return next((replica.models[0] for replica in self.replicas.values() if replica.models), None)

    def knows(self, model: str) -> bool:
        """Whether any replica, healthy or not, serves the model."""
        return any(model in replica.models for replica in self.replicas.values())

    async def acquire(
        self, model: str | None, hashes: Sequence[bytes], excluded: Excluded, artifact: str | None = None
    ) -> Replica:
        """A replica for a request; waits for one if necessary. `Replica.end` releases it.

        artifact: of a stream that has begun; draining replicas of it qualify, too. Raises ApiError: 404 if nobody
        serves the model, 429 if too many requests wait, 503 if no replica became free in time.
        """
        deadline = time.monotonic() + self.config.patience_s
        # Nobody overtakes requests that already wait.
        waits = bool(self._waiters.get(model)) and artifact is None
        while True:
            found = None if waits else self._choose(model, hashes, excluded, artifact)
            waits = False
            if found is not None:
                found.begin()
                if hashes:
                    self._prefixes.note(hashes, found.name)
                return found
            if model is not None and artifact is None and self._all_known() and not self.knows(model):
                names = ", ".join(sorted({name for replica in self.replicas.values() for name in replica.models}))
                message = f"the model {model!r} does not exist: the replicas have {names}"
                raise ApiError(message, status=404, param="model", code="model_not_found")
            await self._wait(model, deadline, pinned=artifact is not None)

    def prefill_for(self, replica: Replica, hashes: Sequence[bytes]) -> Replica | None:
        """The prefill replica for a prompt that `replica` answers; None if there is none with the same KV blocks."""
        able = {
            one.name: one
            for one in self.replicas.values()
            if one.role == "prefill" and one is not replica and one.ready and not one.draining
            and one.blocks and one.blocks == replica.blocks
            # A local replica has an address for this machine alone.
            and (one.pid is None or replica.pid is not None)
        }  # fmt: skip
        if not able:
            return None
        most = math.ceil(self.config.load_factor * (sum(one.num_prefills for one in able.values()) + 1) / len(able))
        for name in self._ring.order(hashes[0]) if hashes else ():
            if name in able and able[name].num_prefills < most:
                return able[name]
        return min(able.values(), key=lambda one: one.num_prefills)

    def takes_requests(self, replica: Replica) -> bool:
        """Whether it answers requests. Prefill replicas do so only while no other replica of their models is ready."""
        return replica.role != "prefill" or not any(
            one.ready and not one.draining and one.role != "prefill" and not set(one.models).isdisjoint(replica.models)
            for one in self.replicas.values()
        )

    @contextlib.contextmanager
    def pin(self, artifact: str) -> Iterator[None]:
        """Keeps at least one replica of `artifact` while a stream of it runs."""
        self._pinned[artifact] = self._pinned.get(artifact, 0) + 1
        try:
            yield
        finally:
            self._pinned[artifact] -= 1
            if not self._pinned[artifact]:
                del self._pinned[artifact]

    async def until_idle(self, replica: Replica) -> None:
        """Waits until a draining replica has no requests left, and no stream needs it as the last of its artifact."""
        while replica.active or (self._pinned.get(replica.artifact) and self._is_last(replica)):
            await asyncio.sleep(_LOOK_S)

    def changed(self) -> None:
        """Wakes all waiting requests, because some replica may have room."""
        for waiters in self._waiters.values():
            for waiter in waiters:
                if not waiter.done():
                    waiter.set_result(None)

    def _has_room(self, replica: Replica) -> None:
        """Wakes one waiting request, because the replica finished one."""
        for model in (None, *replica.models):
            waiter = next((one for one in self._waiters.get(model, ()) if not one.done()), None)
            if waiter is not None:
                waiter.set_result(None)
                return

    def to_json(self) -> dict[str, Any]:
        """For GET /v1/llmc/replicas."""
        return {
            "object": "list",
            "data": [replica.to_json() for replica in self.replicas.values()],
            "waiting_requests": self.num_waiting,
        }

    def _choose(
        self, model: str | None, hashes: Sequence[bytes], excluded: Excluded, artifact: str | None
    ) -> Replica | None:
        able = {
            replica.name: replica
            for replica in self.replicas.values()
            if replica.ready
            and self.takes_requests(replica)
            and (replica.name, replica.epoch) not in excluded
            and (model is None or model in replica.models)
            and (not replica.draining if artifact is None else replica.artifact == artifact)
            # Continuations of streams were admitted already.
            and (replica.active < self.config.max_inflight or artifact is not None)
        }
        if not able:
            return None
        most = math.ceil(self.config.load_factor * (sum(one.active for one in able.values()) + 1) / len(able))
        if hashes:
            seen = self._prefixes.find(hashes)
            if seen in able and able[seen].active < most:
                return able[seen]
            for name in self._ring.order(hashes[0]):
                if name in able and able[name].active < most:
                    return able[name]
        return min(able.values(), key=lambda one: one.active)

    async def _wait(self, model: str | None, deadline: float, *, pinned: bool) -> None:
        left = deadline - time.monotonic()
        full = any(one.ready and one.active >= self.config.max_inflight for one in self.replicas.values())
        if full and self.num_waiting >= self.config.max_waiting and not pinned:
            message = f"all replicas are full and {self.num_waiting} requests wait: try again in 1 s"
            raise ApiError(message, status=429, code="queue_full", headers={"Retry-After": "1"})
        if left <= 0:
            why = "all replicas are full" if full else "no replica is well"
            message = f"{why}, for {self.config.patience_s:g} s now: try again later"
            raise ApiError(message, status=503, code="no_replica", headers={"Retry-After": "5"})
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiters = self._waiters.setdefault(model, deque())
        waiters.append(waiter)
        self.num_waiting += 1
        try:
            await asyncio.wait_for(waiter, min(left, _LOOK_S))
        except TimeoutError:
            pass
        finally:
            self.num_waiting -= 1
            waiters.remove(waiter)
            if not waiters:
                self._waiters.pop(model, None)

    def _all_known(self) -> bool:
        """Whether every replica has reported its models, so that an unlisted model does not exist."""
        return bool(self.replicas) and all(replica.models for replica in self.replicas.values())

    def _is_last(self, replica: Replica) -> bool:
        others: Collection[Replica] = self.replicas.values()
        return not any(one is not replica and one.artifact == replica.artifact and not one.stopping for one in others)
