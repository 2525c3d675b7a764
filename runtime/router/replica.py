"""One replica as the router sees it: its models, health and load."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import Callable, Iterator
from typing import Any, Literal

from . import hops
from .exhausted import RouterExhausted
from .upstream import Headers, ReplicaLost, Upstream

log = logging.getLogger("llmc.router")
State = Literal["starting", "ready", "lost"]
_SOON_S = 0.05


class Replica:
    """A server at an address, which may change when it is restarted.

    epoch counts its restarts; what was known of an earlier epoch no longer holds. draining: it gets no new requests and
    finishes those it has. stopping: its process was told to end. role, blocks: as its /v1/models says. num_prefills:
    prompts that it computes for others.
    router_id: of the router that asks.
    on_room: called when it has one request less. on_change: called when it may accept other requests than before.
    """

    def __init__(
        self,
        name: str,
        url: str | None,
        key: str | None,
        on_room: Callable[[Replica], None],
        on_change: Callable[[], None],
        router_id: str = "",
    ) -> None:
        self.name = name
        self.upstream: Upstream | None = None
        self.state: State = "starting"
        self.models: tuple[str, ...] = ()
        self.listed: list[dict[str, Any]] = []
        self.artifact = ""
        self.role, self.blocks = "both", ""
        self.num_prefills = 0
        self.draining = self.stopping = False
        self.active = self.epoch = self.num_requests = self.num_lost = 0
        self.pid: int | None = None
        self.last_error: str | None = None
        self._headers: Headers = [] if key is None else [(b"authorization", b"Bearer " + key.encode())]
        self._router_id = router_id
        self._on_room, self._on_change = on_room, on_change
        self._look = asyncio.Event()
        self._silent_since: float | None = None
        self._ended = False
        if url is not None:
            self.move(url)

    def move(self, url: str) -> None:
        """Sets the address where it is or soon will be."""
        self.upstream = Upstream(url)
        self.state, self._silent_since, self._ended = "starting", None, False
        self.epoch += 1
        self._look.set()

    def lose(self, why: str) -> None:
        """Marks it as lost, because a request found it gone; it gets no requests until it answers a health check."""
        if self.state == "ready":
            self.state, self.epoch = "lost", self.epoch + 1
            if not self.stopping:
                log.warning("replica %s is lost: %s", self.name, why)
                self.num_lost += 1
        self.last_error = why
        self._look.set()

    def end_process(self, why: str) -> None:
        """As `lose`, where its process has ended: it is not asked again, and `why` stays, until it has an address."""
        self._ended = True
        self.lose(why)

    @property
    def ready(self) -> bool:
        return self.state == "ready"

    def begin(self) -> None:
        """Counts a request given to it."""
        self.active += 1
        self.num_requests += 1

    def end(self) -> None:
        """Counts a request as finished."""
        self.active -= 1
        self._on_room(self)

    @contextlib.contextmanager
    def prefilling(self) -> Iterator[None]:
        """Counts a prompt that it computes for another replica."""
        self.num_prefills += 1
        try:
            yield
        finally:
            self.num_prefills -= 1

    async def watch(self, interval_s: float, timeout_s: float) -> None:
        """Checks its health for ever: at intervals while it is healthy, often while it is not."""
        while True:
            await self._once(timeout_s)
            wait_s = interval_s if self.ready else min(interval_s, _SOON_S * 4)
            self._look.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._look.wait(), wait_s)
            if not self.ready:
                await asyncio.sleep(_SOON_S)

    async def get(self, target: bytes, headers: Headers | None = None) -> tuple[int, bytes]:
        """Status and body of a GET. headers: a client's, which may be none; None sends the router's own key. Raises
        ReplicaLost, and RouterExhausted."""
        if self.upstream is None:
            raise ReplicaLost(f"{self.name} has not started")
        shown = self._headers if headers is None else headers
        kept = [one for one in shown if one[0] != hops.HEADER]
        answer = await self.upstream.request("GET", target, [*kept, hops.behind(shown, self._router_id)], b"")
        try:
            return answer.status, await answer.body()
        finally:
            answer.close()

    async def get_within(self, most_s: float, target: bytes, headers: Headers) -> tuple[int, bytes] | None:
        """As `get`; None if there is no answer within most_s seconds, or none can be had."""
        try:
            async with asyncio.timeout(most_s):
                return await self.get(target, headers)
        except (TimeoutError, ReplicaLost, RouterExhausted):
            return None

    def to_json(self) -> dict[str, Any]:
        """For GET /v1/llmc/replicas."""
        return {
            "name": self.name,
            "url": None if self.upstream is None else self.upstream.base,
            "state": "draining" if self.draining and self.ready else self.state,
            "models": list(self.models),
            "artifact": self.artifact,
            "role": self.role,
            "active_requests": self.active,
            "requests": self.num_requests,
            "times_lost": self.num_lost,
            "last_error": self.last_error,
            "pid": self.pid,
        }

    async def _once(self, timeout_s: float) -> None:
        if self._ended:
            return
        epoch = self.epoch
        try:
            async with asyncio.timeout(timeout_s):
                status, body = await self.get(b"/ready")
                if status == 200:
                    await self._learn()
        except TimeoutError:
            self._late(timeout_s)
            return
        except RouterExhausted:
            return  # nothing is known about the replica
        except ReplicaLost as error:
            if epoch == self.epoch:
                self._gone(str(error))
            self._silent(timeout_s)
            return
        except (ValueError, KeyError, TypeError) as error:
            self._silent_since = None
            if epoch == self.epoch:
                self._gone(str(error))
            return
        if status in (200, 503, hops.LOOP):
            self._silent_since = None
        else:  # another server may have its address now
            self._silent(timeout_s)
        if epoch != self.epoch:  # it was lost or moved in the meantime: check again
            return
        if status == hops.LOOP:
            self._gone("it is this router, or leads back to it: give the address of llmc serve")
        elif status not in (200, 503) and self.state != "ready":
            self._gone(f"GET /ready gives status {status}: give the address of llmc serve")
        elif status == 200:
            if self.state != "ready":
                log.info("replica %s is ready: %s", self.name, ", ".join(self.models))
                self.state, self.last_error = "ready", None
                self._on_change()
        elif self.state == "ready":
            self.state = "starting"
            self.last_error = body.decode("utf-8", "replace")[:200]

    async def _learn(self) -> None:
        status, body = await self.get(b"/v1/models")
        if status != 200:
            raise ValueError(f"GET /v1/models gives status {status}: give --replica-api-key where it asks for a key")
        # At every check, because adapters come and go.
        listed = json.loads(body)["data"]
        self.models = tuple(str(model["id"]) for model in listed)
        self.listed = listed
        first = self.listed[0] if self.listed else {}
        self.artifact = str(first.get("artifact", ""))
        self.role, self.blocks = str(first.get("role", "both")), str(first.get("blocks", ""))

    def _gone(self, why: str) -> None:
        if self.state == "ready":
            self.lose(why)
        elif self.state == "starting" and self.upstream is not None and why != self.last_error:
            log.warning("replica %s is not ready: %s", self.name, why)
        self.last_error = why

    def _late(self, timeout_s: float) -> None:
        """Handles an answer that did not come in time."""
        moved = self._silent(timeout_s)
        if self.state == "ready" or moved:
            self._gone(f"no answer within {timeout_s:g} s")
            self.state = "lost"

    def _silent(self, timeout_s: float) -> bool:
        """Handles a check without an answer of the replica. When there was none for `timeout_s`, its requests move, and
        True is returned.

        Their connections may never end by themselves: a host without power says nothing.
        """
        now = time.monotonic()
        self._silent_since = self._silent_since or now
        if now - self._silent_since < timeout_s:
            return False
        if self.upstream is not None:
            self.upstream.abort_silent(timeout_s)
        return True
