"""One request on its way: given to a replica, and to another one if that is lost, until it is answered."""

from __future__ import annotations

import asyncio
import json
import math
import secrets
import time
import uuid
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import pydantic_core
from starlette.types import Send

from llmc.runtime.server.bodies import check_size
from llmc.runtime.server.errors import ApiError
from llmc.runtime.server.hand_over_headers import HANDED_OVER, INTERIM_HEADER, KEY_HEADER, URL_HEADER
from llmc.runtime.server.protocol.failover import MAX_SENT
from llmc.runtime.server.refusals import PREVIOUS

from . import hops
from .config import RouterConfig
from .dialects import DIALECTS
from .exhausted import RouterExhausted
from .fleet import Excluded, Fleet
from .metrics import RouterMetrics
from .prefixes import block_hashes, prompt_text
from .replica import Replica
from .stream_marks import StreamFailed, StreamMarks
from .upstream import Answer, Headers, ReplicaLost

FIELD = "llmc_failover"
_BUSY = frozenset({429, 502, 503, 504, hops.LOOP})
_OWN_ERRORS = (b'"server_error"', b'"api_error"')
"""Types of errors that are the replica's own: OpenAI's, and that of /v1/messages."""
_COMPLETIONS = "/v1/completions"
_STORED = "/v1/responses/"
_ROOM_S = 0.1
# Hop-by-hop headers, and headers that are rewritten for each connection.
_HOP = frozenset(
    {b"connection", b"keep-alive", b"proxy-connection", b"te", b"trailer", b"transfer-encoding", b"upgrade"}
    | {b"host", b"content-length", b"expect", b"x-request-id", b"x-request-timeout"}
    | {hops.HEADER}
    | {URL_HEADER.encode(), KEY_HEADER.encode(), INTERIM_HEADER.encode()}
)


class ClientLeft(Exception):
    """The client closed its connection."""


@dataclass
class Inbound:
    """An incoming request. target: path and query, as bytes of the request line."""

    method: str
    path: str
    target: bytes
    headers: Headers
    body: bytes

    def header(self, name: bytes) -> bytes:
        """First value of a header; empty if missing."""
        return next((value for key, value in self.headers if key == name), b"")


class Relay:
    """Answers one request through `send`; make one per request. request_id: forwarded, and returned in the answer."""

    def __init__(self, fleet: Fleet, metrics: RouterMetrics, inbound: Inbound, request_id: bytes) -> None:
        self._fleet, self._metrics, self._inbound = fleet, metrics, inbound
        self._config: RouterConfig = fleet.config
        self._request_id = request_id
        self._began = time.monotonic()
        self._body = _parsed(inbound)
        model = self._body.get("model")
        self._model = model if isinstance(model, str) and model else fleet.default_model()
        if inbound.path.startswith(_STORED):  # a stored answer may be of any model
            self._model = None
        text = prompt_text(self._body) if self._body else b""
        self._hashes = block_hashes(text, self._config.block_chars) if text else []
        self._is_long = len(text) >= self._config.hand_over_chars and _num_prompts(inbound.path, self._body) == 1
        self._failover: dict[str, Any] | None = None
        self._marks: StreamMarks | None = None
        self._started = self._streams = False
        self._artifact: str | None = None
        self._exhausted_since: float | None = None
        self._pins = ExitStack()
        self._continue()

    async def run(self, send: Send) -> None:
        """Sends the answer. Raises ApiError if no answer is available and nothing was sent yet."""
        excluded: Excluded = set()
        refusal: tuple[int, Headers, bytes] | None = None
        failed = 0
        with self._pins:
            while True:
                if refusal is not None and refusal[0] != 503 and self._nobody_left(excluded):
                    return await self._send_whole(send, *refusal)
                replica = await self._acquire(send, excluded)
                if replica is None:
                    return
                epoch = replica.epoch
                try:
                    refusal = await self._once(replica, send)
                    if refusal is None:
                        return
                    if not self._started:
                        self._metrics.retries.inc()
                    await self._note_refusal(replica, epoch, refusal[0], excluded)
                except RouterExhausted as error:
                    if not await self._may_try_again(send, error):
                        return
                except (ReplicaLost, StreamFailed, ValueError) as error:
                    failed += 1
                    if not isinstance(error, StreamFailed) and epoch == replica.epoch:
                        replica.lose(str(error))
                    excluded.add((replica.name, epoch))
                    (self._metrics.failovers if self._started else self._metrics.retries).inc()
                    if failed > self._config.retries or (self._started and self._marks is None):
                        return await self._give_up(send, error)
                    if self._marks is not None:
                        self._marks.restart()
                finally:
                    replica.end()

    async def end(self, send: Send, error: ApiError) -> None:
        """Ends the answer of a cancelled `run` with an error. Raises `error` if nothing was sent, and ReplicaLost where
        the client must see that the answer is cut off."""
        if not self._started:
            raise error
        if not self._streams or self._marks is None:
            raise ReplicaLost(str(error))
        await self._end_stream(send, b"" if self._marks.done else self._event_of(error))

    async def _once(self, replica: Replica, send: Send) -> tuple[int, Headers, bytes] | None:
        """One attempt. Returns the refusal of a replica that has no room, or None once the answer is sent."""
        assert replica.upstream is not None
        inbound, headers = self._inbound, self._headers()
        prefill = self._prefill_for(replica)
        if prefill is not None and prefill.upstream is not None:
            headers += [(URL_HEADER.encode(), prefill.upstream.url.encode())]
            headers += [(KEY_HEADER.encode(), str(self._config.hand_over_key).encode())]
            headers += [(INTERIM_HEADER.encode(), b"1")]
        body = self._body_for(replica)
        with ExitStack() as handing_over:
            if prefill is not None:
                handing_over.enter_context(prefill.prefilling())

            def handed_over(status: int) -> None:
                if status == HANDED_OVER:
                    handing_over.close()

            answer = await replica.upstream.request(inbound.method, inbound.target, headers, body, handed_over)
        try:
            streams = answer.status == 200 and answer.header(b"content-type").startswith(b"text/event-stream")
            if self._started or streams:
                return await self._pass_stream(replica, answer, send)
            body = await answer.body()
        finally:
            answer.close()
        whole = answer.status, answer.headers, body
        refuses = answer.status in _BUSY or _is_server_error(answer.status, body)
        if refuses or _may_be_elsewhere(inbound.path, answer.status, body):
            return whole
        await self._send_whole(send, *whole)
        return None

    async def _pass_stream(self, replica: Replica, answer: Answer, send: Send) -> tuple[int, Headers, bytes] | None:
        marks = self._marks
        if answer.status != 200:
            body = await answer.body()
            if answer.status in _BUSY:
                return answer.status, answer.headers, body
            # The stream has begun, and a replica of the same artifact refuses the rest.
            assert marks is not None
            event = marks.dialect.refusal_event(body, marks.num_events)
            if answer.status >= 500:
                raise StreamFailed(str(answer.status), event)
            await self._end_stream(send, event)
            return None
        try:
            async for piece in answer.pieces():
                told = piece if marks is None else marks.feed(piece)
                if told:
                    await self._send_piece(replica, answer, told, send)
                if marks is not None and marks.failure is not None:
                    raise marks.failure
        except ReplicaLost:
            if marks is None or not marks.done:
                raise
        if marks is not None and not marks.done:
            raise ReplicaLost(f"{replica.name}: the stream ended early")
        if not self._started:
            await self._start(send, answer.status, answer.headers)
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        return None

    async def _send_piece(self, replica: Replica, answer: Answer, piece: bytes, send: Send) -> None:
        if not self._started:
            await self._start(send, answer.status, answer.headers)
            self._artifact = replica.artifact
            self._pins.enter_context(self._fleet.pin(replica.artifact))
        await send({"type": "http.response.body", "body": piece, "more_body": True})

    def _continue(self) -> None:
        """Prepares the request so that its answer does not depend on the replica, and a stream can continue
        elsewhere."""
        dialect = DIALECTS.get(self._inbound.path)
        # A router before this one takes care of it.
        if dialect is None or not self._body or self._inbound.method != "POST" or self._body.get(FIELD) is not None:
            return
        self._failover = {
            "id": f"{dialect.prefix}{uuid.uuid4().hex}",
            "created": int(time.time()),
            "seed": secrets.randbits(63),
        }
        if self._body.get("stream") is True:
            self._marks = StreamMarks(dialect, _num_choices(self._inbound.path, self._body))

    def _prefill_for(self, replica: Replica) -> Replica | None:
        """The replica that computes the prompt first, if it is long and another one answers."""
        if self._config.hand_over_key is None or not self._is_long or self._failover is None:
            return None
        found = self._fleet.prefill_for(replica, self._hashes) if replica.role == "decode" else None
        if found is not None:
            self._metrics.hand_overs.inc()
        return found

    def _body_for(self, replica: Replica) -> bytes:
        body = self._inbound.body
        if self._failover is None:
            return body
        failover = self._failover
        if self._marks is not None and self._started:
            failover = {**failover, "sent": self._marks.sent(), "num_events": self._marks.num_events}
        added = json.dumps(failover, separators=(",", ":")).encode()
        # Parsed as an object; of two fields with the same name the last one counts.
        return b'%s,"%s":%s}' % (body.rstrip()[:-1], FIELD.encode(), added)

    def _headers(self) -> list[tuple[bytes, bytes]]:
        headers = [(name, value) for name, value in self._inbound.headers if name not in _HOP]
        headers.append((b"x-request-id", self._request_id))
        headers.append(hops.behind(self._inbound.headers, self._fleet.router_id))
        if timeout := self._inbound.header(b"x-request-timeout"):
            headers.append((b"x-request-timeout", self._time_left(timeout)))
        return headers

    def _time_left(self, timeout: bytes) -> bytes:
        """What remains of the client's time limit, over all attempts. A value that is not a number is left for the
        replica to refuse."""
        try:
            seconds = float(timeout)
        except ValueError:
            return timeout
        return (
            timeout
            if not math.isfinite(seconds) or seconds <= 0
            else b"%g" % max(1e-3, seconds - (time.monotonic() - self._began))
        )

    async def _acquire(self, send: Send, excluded: Excluded) -> Replica | None:
        try:
            return await self._fleet.acquire(self._model, self._hashes, excluded, self._artifact)
        except ApiError as error:
            if not self._started:
                raise
            await self._end_stream(send, self._event_of(error))
            return None

    async def _note_refusal(self, replica: Replica, epoch: int, status: int, excluded: Excluded) -> None:
        if status == 503 and epoch == replica.epoch:  # it is starting or stopping
            replica.lose("it takes no requests now")
        if self._started and status != hops.LOOP:  # any of them may continue the stream once there is room
            await asyncio.sleep(_ROOM_S)
        else:
            excluded.add((replica.name, epoch))

    async def _may_try_again(self, send: Send, error: RouterExhausted) -> bool:
        """Waits a little, so that a stream that has begun goes on once there is a connection for it. Raises `error` if
        nothing was sent yet."""
        if not self._started:
            raise error
        now = time.monotonic()
        self._exhausted_since = self._exhausted_since or now
        if now - self._exhausted_since >= self._config.patience_s:
            await self._end_stream(send, self._event_of(error))
            return False
        await asyncio.sleep(_ROOM_S)
        return True

    def _nobody_left(self, excluded: Excluded) -> bool:
        """Whether all healthy replicas have refused the request."""
        replicas = self._fleet.replicas.values()
        well = [one for one in replicas if one.ready and not one.draining and self._fleet.takes_requests(one)]
        able = [one for one in well if self._model in (None, *one.models)]
        return bool(able) and not self._started and all((one.name, one.epoch) in excluded for one in able)

    async def _give_up(self, send: Send, error: Exception) -> None:
        if self._started:
            if self._marks is None:  # nobody can continue it: the client must see that it is cut off
                raise ReplicaLost(str(error)) from error
            event = error.event if isinstance(error, StreamFailed) else self._event_of(_lost(error))
            await self._end_stream(send, event)
            return
        raise _lost(error)

    async def _end_stream(self, send: Send, event: bytes) -> None:
        assert self._marks is not None
        self._metrics.broken.inc()
        await send({"type": "http.response.body", "body": event + self._marks.dialect.done, "more_body": False})

    def _event_of(self, error: ApiError) -> bytes:
        """An error as an event of a stream that has begun."""
        assert self._marks is not None
        return self._marks.dialect.error_event(error, self._marks.num_events)

    async def _start(self, send: Send, status: int, headers: Headers) -> None:
        self._started = self._streams = True
        kept = [(name, value) for name, value in headers if name not in _HOP]
        kept.append((b"x-request-id", self._request_id))
        await send({"type": "http.response.start", "status": status, "headers": kept})

    async def _send_whole(self, send: Send, status: int, headers: Headers, body: bytes) -> None:
        kept = [(name, value) for name, value in headers if name not in _HOP]
        kept += [(b"x-request-id", self._request_id), (b"content-length", b"%d" % len(body))]
        self._started = True
        await send({"type": "http.response.start", "status": status, "headers": kept})
        await send({"type": "http.response.body", "body": body, "more_body": False})


async def until_left(work: asyncio.Task[None], left: asyncio.Task[None]) -> None:
    """Waits until the answer is sent, or cancels it when the client leaves. Raises what `work` raises, and
    ClientLeft."""
    try:
        await asyncio.wait({work, left}, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            raise ClientLeft
        work.result()
    finally:
        left.cancel()
        work.cancel()


def _parsed(inbound: Inbound) -> dict[str, Any]:
    """JSON object of a body; empty if it is none, or packed, which the replica will report."""
    if not inbound.body or b"json" not in inbound.header(b"content-type").lower():
        return {}
    if inbound.header(b"content-encoding").strip().lower() not in (b"", b"identity"):
        return {}
    check_size(inbound.body)
    try:
        body = pydantic_core.from_json(inbound.body)
    except ValueError:
        return {}
    return body if isinstance(body, dict) else {}


def _num_prompts(path: str, body: Mapping[str, Any]) -> int:
    """Prompts that are answered; only completions have several."""
    prompt = body.get("prompt") if path == _COMPLETIONS else None
    several = isinstance(prompt, list) and bool(prompt) and not isinstance(prompt[0], int)
    return len(prompt) if several and isinstance(prompt, list) else 1


def _num_choices(path: str, body: Mapping[str, Any]) -> int:
    """Choices over all prompts; an invalid request is left for the replica to refuse."""
    n = body.get("n")
    each = int(n) if isinstance(n, (int, float)) and 1 <= n <= MAX_SENT else 1
    return min(MAX_SENT, each * _num_prompts(path, body))


def _is_server_error(status: int, body: bytes) -> bool:
    """Whether the error is the replica's own, so that another one may succeed."""
    return status == 500 and any(kind in body for kind in _OWN_ERRORS)


def _may_be_elsewhere(path: str, status: int, body: bytes) -> bool:
    """Whether an answer says that another one is not stored at the replica, but perhaps at the next one."""
    if path.startswith(_STORED):
        return status == 404 and b'"response_not_found"' in body
    return status == 400 and b'"%s"' % PREVIOUS.encode() in body


def _lost(error: Exception) -> ApiError:
    return ApiError(f"the replicas that tried were lost: {error}", status=502, code="replica_lost")
