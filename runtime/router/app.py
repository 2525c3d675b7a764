"""The router as an ASGI application: requests it answers itself, and requests it forwards."""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import re
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.types import Receive, Scope, Send

from llmc.runtime.address import UrlError
from llmc.runtime.server.api_keys import KnownKeys
from llmc.runtime.server.errors import ApiError, draining, no_valid_key
from llmc.runtime.server.http_protocol import arrived_late
from llmc.runtime.server.message_errors import response_of
from llmc.runtime.server.trailing_slash import drop_trailing_slash
from llmc.version import __version__

from . import hops
from .config import RouterConfig
from .fleet import Fleet
from .live import live_requests, live_state, no_replica_answers
from .metrics import RouterMetrics
from .relay import ClientLeft, Inbound, Relay, until_left
from .upstream import Headers, ReplicaLost

log = logging.getLogger("llmc.router")
_REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")
_MODELS = b"/v1/models"
_MOST_WAIT_S = 2.0  # for a replica that may know a key
_PREFIX = "/v1/llmc/replicas"
_OWN = frozenset({"/health", "/ready", "/version", "/metrics", "/v1/models", _PREFIX}) | frozenset(
    {"/v1/llmc/state", "/v1/llmc/requests"}
)
_JSON = (b"content-type", b"application/json")
Update = Callable[[str | None, str | None], Awaitable[dict[str, Any]]]
"""Replaces local replicas. Arguments: (model, artifact); None for all models, or for the current target of the paths.
Raises ApiError."""


class RouterApp:
    """Entry point of every request. update: None if no replica is local."""

    def __init__(self, config: RouterConfig, fleet: Fleet, metrics: RouterMetrics, update: Update | None) -> None:
        self._config, self._fleet, self._metrics, self._update = config, fleet, metrics, update
        self._keys = None if config.replica_key is None else KnownKeys([config.replica_key])
        self.stopping = False
        self._running: set[asyncio.Task[None]] = set()

    @property
    def num_running(self) -> int:
        """Requests that replicas answer, or that wait for one."""
        return len(self._running)

    def begin_drain(self, timeout_s: float | None) -> asyncio.Task[int]:
        """Refuses new requests; running ones get timeout_s (None: no limit). The task returns how many were
        cancelled."""
        self.stopping = True
        return asyncio.create_task(self._drain(timeout_s))

    def abandon(self) -> int:
        """Ends all requests at once, with an error; returns their number."""
        self.stopping = True
        for work in self._running:
            work.cancel()
        return len(self._running)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        drop_trailing_slash(scope)
        headers: Headers = scope["headers"]
        given = next((value for name, value in headers if name == b"x-request-id"), b"")
        request_id = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex.encode()
        status = 500

        async def noted(message: Any) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._answer(scope, receive, noted, request_id)
        except ApiError as error:
            error.headers["X-Request-Id"] = request_id.decode()
            await response_of(error, scope["path"])(scope, receive, noted)
        except ClientLeft:
            status = 408 if arrived_late(scope) else 499
        except ReplicaLost as error:
            # The answer is cut off; the client notices because the connection ends before the body does.
            log.warning("%s %s is cut off: %s", scope["method"], scope["path"], error)
        finally:
            if not _is_own(scope["method"], scope["path"]):
                self._metrics.requests.labels(str(status)).inc()

    async def _answer(self, scope: Scope, receive: Receive, send: Send, request_id: bytes) -> None:
        hops.check_no_loop(scope["headers"], self._fleet.router_id)
        # Of an answer to HEAD, uvicorn leaves out the body.
        method, path = "GET" if scope["method"] == "HEAD" else scope["method"], scope["path"]
        body = await self._read(scope["headers"], receive)
        query: bytes = scope["query_string"]
        target = scope.get("raw_path", path.encode()) + (b"?" + query if query else b"")
        inbound = Inbound(method, path, target, scope["headers"], body)
        own = self._own(method, path, inbound)
        if own is not None:
            status, content = await own
            kind = _JSON if isinstance(content, dict) else (b"content-type", b"text/plain; version=0.0.4")
            data = json.dumps(content).encode() if isinstance(content, dict) else content
            headers = [kind, (b"content-length", b"%d" % len(data)), (b"x-request-id", request_id)]
            if status == 503:
                headers.append((b"retry-after", b"5"))
            if self.stopping:
                headers.append((b"connection", b"close"))
            await send({"type": "http.response.start", "status": status, "headers": headers})
            await send({"type": "http.response.body", "body": data})
            return
        if self.stopping:
            raise draining("the router is shutting down: try again later")
        relay = Relay(self._fleet, self._metrics, inbound, request_id)
        work = asyncio.create_task(relay.run(send))
        self._running.add(work)
        work.add_done_callback(self._running.discard)
        try:
            await until_left(work, asyncio.create_task(_client_left(receive)))
        except asyncio.CancelledError:
            if not work.cancelled():
                raise
            await relay.end(send, draining("the router shut down before the answer was complete"))

    async def _drain(self, timeout_s: float | None) -> int:
        if self._running:
            await asyncio.wait(set(self._running), timeout=timeout_s)
        return self.abandon()

    def _own(self, method: str, path: str, inbound: Inbound) -> Awaitable[tuple[int, dict[str, Any] | bytes]] | None:
        """The router's own answer; None for requests that replicas answer."""
        if method == "GET":
            match path:
                case "/health" | "/ready":
                    return self._health(path == "/ready")
                case "/version":
                    return _done(200, {"version": __version__, "router": True})
                case "/v1/models":
                    return self._models(inbound)
                case "/metrics":
                    return self._page(inbound)
                case "/v1/llmc/state":
                    return live_state(self._fleet, _shown(inbound))
                case "/v1/llmc/requests":
                    return live_requests(self._fleet, _shown(inbound))
                case "/v1/llmc/replicas":
                    return _done(200, self._fleet.to_json())
        if _administers(path):
            return self._administer(method, path, inbound)
        return None

    async def _health(self, ready: bool) -> tuple[int, dict[str, Any] | bytes]:
        replicas = list(self._fleet.replicas.values())
        count = sum(one.ready and not one.draining for one in replicas)
        if self.stopping:
            return 503, {"status": "draining"}
        well = {"status": "ready" if ready else "ok", "replicas": len(replicas), "ready_replicas": count}
        # The process is healthy without replicas, which may come back; requests wait for them.
        return (200, well) if count or not ready else (503, {**well, "status": "starting"})

    async def _models(self, inbound: Inbound) -> tuple[int, dict[str, Any] | bytes]:
        # Replicas that ask the router for a key ask clients, too. They may know others besides.
        if self._keys is not None and self._keys.number(inbound.headers) is None:
            headers, ready = _shown(inbound), [one for one in self._fleet.replicas.values() if one.ready]
            answers = await asyncio.gather(*(one.get_within(_MOST_WAIT_S, _MODELS, headers) for one in ready))
            if ready and not any(answers):
                raise no_replica_answers()
            if not any(answer is not None and answer[0] == 200 for answer in answers):
                raise no_valid_key()
        found: dict[str, dict[str, Any]] = {}
        for replica in self._fleet.replicas.values():
            if not replica.draining:
                for model in replica.listed:
                    found.setdefault(str(model["id"]), model)
        return 200, {"object": "list", "data": list(found.values())}

    async def _page(self, inbound: Inbound) -> tuple[int, dict[str, Any] | bytes]:
        return 200, await self._metrics.page(self._fleet, _shown(inbound))

    async def _administer(self, method: str, path: str, inbound: Inbound) -> tuple[int, dict[str, Any] | bytes]:
        self._check_admin(inbound)
        if method != "POST":
            raise ApiError(
                f"{path} does not take {method}: use POST",
                status=405,
                headers={"Allow": "POST"},
            )
        asked = _object(inbound.body)
        if path == "/v1/llmc/update":
            if self._update is None:
                raise ApiError("no replica is local: start the router with --spawn to update them", status=409)
            return 202, await self._update(_text(asked, "model"), _text(asked, "artifact"))
        words = path.removeprefix(_PREFIX).strip("/").split("/")
        if words == [""]:
            return self._add(_text(asked, "url"))
        replica = self._fleet.replicas.get(words[0])
        if replica is None or len(words) != 2 or words[1] not in ("drain", "resume", "remove"):
            names = ", ".join(self._fleet.replicas)
            message = f"{path} is unknown: use drain, resume or remove behind one of {names}"
            raise ApiError(message, status=404)
        if words[1] == "remove":
            if replica.active:
                raise ApiError(f"{replica.name} has {replica.active} requests: drain it first", status=409)
            if replica.pid is not None:
                raise ApiError(f"{replica.name} belongs to --spawn: drain it", status=409)
            await self._fleet.remove(replica.name)
        else:
            replica.draining = words[1] == "drain"
            self._fleet.changed()
        return 200, replica.to_json()

    def _add(self, url: str | None) -> tuple[int, dict[str, Any] | bytes]:
        if url is None:
            raise ApiError('give the address of a replica: {"url": "http://HOST:PORT"}', param="url")
        try:
            name = self._fleet.name_of(url)
            if name in self._fleet.replicas:
                raise ApiError(f"{name} is already a replica: give another url", status=409, param="url")
            return 201, self._fleet.add(name, url).to_json()
        except UrlError as error:
            raise ApiError(str(error), param="url") from error

    def _check_admin(self, inbound: Inbound) -> None:
        key = self._config.admin_key
        if key is None:
            message = "replicas are not administered over HTTP: start the router with --admin-key"
            raise ApiError(message, status=403, code="no_admin_key")
        scheme, _, shown = inbound.header(b"authorization").partition(b" ")
        if scheme.lower() != b"bearer" or not hmac.compare_digest(shown.strip(), key.encode()):
            raise ApiError("show the admin key as Authorization: Bearer KEY", status=401, code="invalid_api_key")

    async def _read(self, headers: Headers, receive: Receive) -> bytes:
        parts, size, most = list[bytes](), 0, self._config.max_body_bytes
        declared = next((value for name, value in headers if name == b"content-length"), b"")
        if declared.isdigit() and int(declared) > most:  # before a client that waits for it is told to go on
            raise _too_large(most)
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientLeft
            part = message.get("body", b"")
            size += len(part)
            if size > most:
                raise _too_large(most)
            parts.append(part)
            if not message.get("more_body"):
                return parts[0] if len(parts) == 1 else b"".join(parts)


def _too_large(most: int) -> ApiError:
    message = f"the body is larger than {most} bytes: send less, or raise --max-body-size"
    return ApiError(message, status=413, headers={"Connection": "close"})


def _administers(path: str) -> bool:
    return path == "/v1/llmc/update" or path.startswith(_PREFIX)


def _is_own(method: str, path: str) -> bool:
    """Whether the router itself answers."""
    return (method in ("GET", "HEAD") and path in _OWN) or _administers(path)


async def _client_left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _shown(inbound: Inbound) -> Headers:
    """The client's API key, for replicas that want one, and the routers before this one."""
    return [(name, value) for name, value in inbound.headers if name in (b"authorization", b"x-api-key", hops.HEADER)]


async def _done(status: int, content: dict[str, Any]) -> tuple[int, dict[str, Any] | bytes]:
    return status, content


def _object(body: bytes) -> dict[str, Any]:
    try:
        found = json.loads(body or b"{}")
    except ValueError as error:
        raise ApiError(f"the body is not valid JSON: {error}", code="invalid_json") from error
    if not isinstance(found, dict):
        raise ApiError("the body is not a JSON object", code="invalid_json")
    return found


def _text(asked: dict[str, Any], name: str) -> str | None:
    value = asked.get(name)
    if value is not None and (not isinstance(value, str) or not value):
        raise ApiError(f"{name} is {value!r}: give a text, or leave it out", param=name)
    return value
