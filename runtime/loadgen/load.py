"""Runs a schedule: sends each request when due, and stores the reply."""

from __future__ import annotations

import asyncio
import gc
import json
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .answer import Outcome, failed, read_answer
from .http import HttpClient, HttpError, Reply
from .workload import ENDPOINTS, Ask, Workload, request_body

_HELD_BYTES = 256 << 20


class ServerError(RuntimeError):
    """A server cannot be measured; the message is one sentence."""


@dataclass(frozen=True)
class LoadConfig:
    """concurrency: most concurrent requests; 0 for no limit. strict: usage with other lengths than requested counts as
    failure. extra: further body fields."""

    endpoint: str = "completions"
    model: str = ""
    concurrency: int = 0
    ignore_eos: bool = False
    strict: bool = False
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ServerFacts:
    """Facts from /v1/models; None where missing."""

    model: str
    max_model_len: int | None
    vocab_size: int | None


async def server_facts(client: HttpClient, model: str | None) -> ServerFacts:
    """The model `model` of the server, or its first. Raises ServerError."""
    try:
        reply = await client.request("GET", "/v1/models")
    except HttpError as error:
        raise ServerError(f"{error}: start the server, or correct --url") from error
    try:
        entries = json.loads(reply.body)["data"] if reply.status == 200 else None
        names = [entry["id"] for entry in entries or ()]
    except (ValueError, KeyError, TypeError) as error:
        raise ServerError(
            "/v1/models of the server is not a list of models: give the URL of an OpenAI-compatible server"
        ) from error
    if entries is None:
        raise ServerError(
            f"/v1/models of the server answers {reply.status}: {reply.body[:200].decode(errors='replace')}"
        )
    if model is not None and model not in names:
        raise ServerError(f"the server has no model {model!r}: it has {', '.join(names) or 'none'}")
    if not names:
        raise ServerError("the server has no model: load one")
    entry = entries[names.index(model) if model is not None else 0]
    # llama.cpp's server has its facts in "meta".
    meta = entry.get("meta") or {}
    return ServerFacts(
        entry["id"],
        entry.get("max_model_len") or meta.get("n_ctx_train"),
        entry.get("vocab_size") or meta.get("n_vocab"),
    )


class _Kept:
    """Outcomes in order of completion. Replies are parsed after the run, or earlier if too many bytes are held."""

    def __init__(self, workload: Workload, strict: bool) -> None:
        self._workload, self._strict = workload, strict
        self._waiting: deque[tuple[int, int, Reply]] = deque()
        self._held = 0
        self._outcomes: list[Outcome] = []

    def add_reply(self, index: int, due_ns: int, reply: Reply) -> None:
        self._waiting.append((index, due_ns, reply))
        self._held += sum(len(piece) for _, piece in reply.pieces)
        while self._held > _HELD_BYTES:
            self._read()

    def add(self, outcome: Outcome) -> None:
        self._outcomes.append(outcome)

    def _read(self) -> None:
        index, due_ns, reply = self._waiting.popleft()
        self._held -= sum(len(piece) for _, piece in reply.pieces)
        ask = self._workload.ask(index) if self._strict else None
        self._outcomes.append(read_answer(index, due_ns, reply, ask))

    def all(self) -> list[Outcome]:
        while self._waiting:
            self._read()
        return sorted(self._outcomes, key=lambda outcome: outcome.index)


async def run_load(
    client: HttpClient,
    workload: Workload,
    arrival_s: Sequence[float],
    config: LoadConfig,
    on_end: Callable[[int], None] = lambda num_ended: None,
) -> list[Outcome]:
    """Sends request i at arrival_s[i] seconds from now, or later if the concurrency limit delays it. Returns outcomes
    by index.

    on_end: called after each request with the number finished. Cancellation cancels running requests.
    """
    gate = asyncio.Semaphore(config.concurrency) if config.concurrency else None
    kept = _Kept(workload, config.strict)
    path = ENDPOINTS[config.endpoint]
    num_ended = 0

    async def one(index: int, due_ns: int, body: bytes) -> None:
        nonlocal num_ended
        try:
            kept.add_reply(index, due_ns, await client.request("POST", path, body))
        except HttpError as error:
            kept.add(failed(index, due_ns, error, time.monotonic_ns()))
        finally:
            if gate is not None:
                gate.release()
        num_ended += 1
        on_end(num_ended)

    # A garbage collection over everything a run holds would distort all running measurements.
    gc.collect()
    gc.disable()
    try:
        start_ns = time.monotonic_ns()
        async with asyncio.TaskGroup() as tasks:
            for index in range(len(workload)):
                due_ns = start_ns + int(arrival_s[index] * 1e9)
                body = request_body(
                    workload.ask(index), config.endpoint, config.model, config.extra, ignore_eos=config.ignore_eos
                )
                if gate is not None:
                    await gate.acquire()
                if (delay := (due_ns - time.monotonic_ns()) / 1e9) > 0:
                    await asyncio.sleep(delay)
                tasks.create_task(one(index, due_ns, body))
                # Send it before the next one is created.
                await asyncio.sleep(0)
    finally:
        gc.enable()
    return kept.all()


async def ask_once(client: HttpClient, ask: Ask, config: LoadConfig) -> Outcome:
    """Sends one request before a run. Raises ServerError if it fails."""
    body = request_body(ask, config.endpoint, config.model, config.extra, ignore_eos=config.ignore_eos)
    try:
        reply = await client.request("POST", ENDPOINTS[config.endpoint], body)
    except HttpError as error:
        raise ServerError(f"the first request failed: {error}") from error
    outcome = read_answer(0, reply.start_ns, reply, ask if config.strict else None)
    if outcome.failure is not None:
        raise ServerError(f"the first request failed with {outcome.failure}: {outcome.detail}")
    return outcome
