"""Memory of requests: each reserves the most it may hold, and releases it when its response is over.

So no client can make the process grow beyond a limit by multiplying prompts, continuations, tokens or logprobs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .refusals import MEMORY
from .request_size import BODY_FACTOR, RequestSize
from .requests import EngineRequest

_MIB = 1 << 20
MIN_DEFAULT_BYTES, MAX_DEFAULT_BYTES = 256 * _MIB, 16 << 30
_SHARE_OF_FREE, _SHARE_OF_TOTAL = 4, 4
_current: ContextVar[Lease | None] = ContextVar("llmc_request_memory", default=None)


class MemoryRefused(HTTPException):
    """A request that would hold too much memory. status 413: it never fits; 429: it does not fit beside the others.
    param: the field to lower."""

    def __init__(self, status: int, message: str, param: str | None = None, retry_after_s: int | None = None) -> None:
        headers = None if retry_after_s is None else {"Retry-After": str(retry_after_s)}
        super().__init__(status, message, headers)
        self.code = MEMORY if status == 413 else "memory_full"
        self.param = param


@dataclass(frozen=True)
class MemoryLimits:
    """Limits in bytes: for all waiting and running requests together, and for one request."""

    total: int
    request: int

    @classmethod
    def of(cls, total: int, request: int, free: int) -> MemoryLimits:
        """The given limits; 0: derived from `free`, the bytes that the machine has left once the model is loaded."""
        total = total or min(max(free // _SHARE_OF_FREE, MIN_DEFAULT_BYTES), MAX_DEFAULT_BYTES)
        return cls(total, min(request or max(total // _SHARE_OF_TOTAL, min(total, MIN_DEFAULT_BYTES // 2)), total))


class RequestMemory:
    """The memory budget; lives on the event loop. retry_after_s: when a request that found no room should come back."""

    def __init__(self, limits: MemoryLimits, retry_after_s: Callable[[], int] = lambda: 1) -> None:
        self.limits = limits
        self.reserved = self.peak = 0
        self._retry_after_s = retry_after_s

    def reserve(self, requests: Sequence[EngineRequest], max_model_len: int, vocab_size: int, *, streams: bool) -> None:
        """Reserves memory for the HTTP request that the current task serves, until its response is over. Raises
        MemoryRefused."""
        lease = _current.get()
        if lease is None or not requests:
            return
        size = RequestSize.of(requests, max_model_len, vocab_size, streams=streams)
        lease.reserve(size.bytes, size)

    def lease(self) -> Lease:
        """A lease for one HTTP request."""
        return Lease(self)

    def _take(self, lease: Lease, count: int, size: RequestSize | None) -> None:
        wanted, limits = lease.bytes + count, self.limits
        if wanted > limits.request:
            field, factors = ("", "its body") if size is None else size.advice()
            raise MemoryRefused(
                413,
                f"the request may need {_shown(wanted)} ({factors}), the most allowed is "
                f"{_shown(limits.request)}: {f'lower {field}' if field else 'send less'}, or raise --request-memory",
                field or None,
            )
        if self.reserved + count > limits.total:
            seconds = self._retry_after_s()
            raise MemoryRefused(
                429,
                f"the request may need {_shown(wanted)}, and {_shown(limits.total - self.reserved)} of "
                f"--max-queue-memory ({_shown(limits.total)}) are free: try again in {seconds} s",
                retry_after_s=seconds,
            )
        lease.bytes = wanted
        self.reserved += count
        self.peak = max(self.peak, self.reserved)

    def _give_back(self, lease: Lease) -> None:
        self.reserved -= lease.bytes
        lease.bytes = 0


class Lease:
    """Reservation of one HTTP request."""

    def __init__(self, memory: RequestMemory) -> None:
        self.bytes = 0
        self._memory = memory

    def reserve(self, count: int, size: RequestSize | None = None) -> None:
        """Reserves `count` more bytes. size: the request they are for; None: the body. Raises MemoryRefused."""
        self._memory._take(self, count, size)

    def release(self) -> None:
        """Releases all of it; may be called twice."""
        self._memory._give_back(self)


class RequestMemoryMiddleware:
    """Gives each HTTP request its lease, counts its body as it arrives, and releases the lease after the response."""

    def __init__(self, app: ASGIApp, memory: RequestMemory) -> None:
        self._app = app
        self._memory = memory

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        lease = self._memory.lease()

        async def counted() -> Message:
            message = await receive()
            if message["type"] == "http.request" and (body := message.get("body")):
                lease.reserve(BODY_FACTOR * len(body))
            return message

        token = _current.set(lease)
        try:
            await self._app(scope, counted, send)
        finally:
            _current.reset(token)
            lease.release()


def _shown(count: int) -> str:
    if count < _MIB:
        return f"{count} bytes"
    return f"{count / _MIB:.1f} MiB" if count < 1 << 30 else f"{count / 2**30:.2f} GiB"
