"""Prefill and decode on different servers: KV blocks of a prompt come from a prefill server, instead of being computed.

A router names the prefill server in headers of a request. The decode server asks it for the blocks of the prompt and
enters them into its prefix cache; then the request runs as always. Whatever fails, the request computes what is
missing, with the same bits. docs/replicas.md describes it for users.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import hashlib
import hmac
import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from fastapi import Request

from llmc.manifest import read_manifest
from llmc.runtime.address import UrlError
from llmc.runtime.binding import LlmcError
from llmc.runtime.binding.hand_over import HandedText, blocks_of_part, least_part_bytes
from llmc.runtime.router.upstream import Answer, ReplicaLost, Upstream

from .async_engine import AsyncEngine
from .block_frames import FrameError, FrameReader
from .config import Role, ServerConfig
from .event_stream import until_gone
from .hand_over_headers import INTERIM_HEADER, KEY_HEADER, URL_HEADER
from .http_protocol import INTERIM
from .lanes import Lanes
from .requests import EngineRequest, ServerStopping
from .shared_blocks import ADDRESS_HEADER, GivenMemory, TakenMemory

log = logging.getLogger("llmc.server")
PATH = "/v1/llmc/blocks"
PIECE_BYTES = 4 << 20
"""Size of a part of a text's blocks, if a single block is not larger. Steps wait while a part is copied."""
_MOST_SERVERS = 64
_SAID_EVERY_S = 10.0
_APART_S = 60.0
_MOST_SAID = 300  # bytes of an error that are read
# Errors of the engine that blame the blocks: damaged, of another text or artifact, of another version.
_OF_BLOCKS = frozenset({"corrupt", "invalid_argument", "out_of_range", "version"})
# What a manifest says that decides a token's KV, besides weights.
_DECIDES = (
    "fingerprint", "llmc_version", "target", "act_dtype", "kv_dtype", "kv_scales", "block_size", "tensor_parallel",
    "expert_parallel", "weights_crc32", "tools",
)  # fmt: skip
# What decides the code of a kernel, besides its shapes and its schedule, neither of which changes a result.
_DECIDES_CODE = ("target", "template", "tvm")
# Only some ladders have graphs that need it. Without it attention has the same bits.
_OF_SOME_LADDERS = "merge_attention"


def kv_identity(artifact: Path) -> str:
    """Equal for artifacts whose KV blocks of equal tokens have equal bits, whatever their buckets: 64 hex digits.

    Raises ManifestError.
    """
    manifest = read_manifest(artifact)
    facts = {name: manifest.get(name) for name in _DECIDES}
    facts["kernels"] = _kernels(manifest)
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _kernels(manifest: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """By op: the sources that made its kernels, which change without the version of llmc."""
    return sorted(
        {
            (op, *(kernel["components"].get(name, "") for name in _DECIDES_CODE))
            for kernel in manifest.get("kernels") or ()
            if (op := kernel.get("op") or "") != _OF_SOME_LADDERS
        }
    )


def no_hand_over(config: ServerConfig, engine: AsyncEngine) -> str | None:
    """Why KV blocks cannot be handed over; None if they can."""
    if not config.prefix_cache:
        return "blocks go from one prefix cache to another: leave out --no-prefix-cache"
    if engine.vector_task is not None:
        return f"{config.artifact} gives vectors and decodes nothing"
    if engine.artifact.info.num_ranks > 1:
        return f"{config.artifact} runs on several ranks, whose blocks are not handed over"
    return None


def hand_over_key(config: ServerConfig, engine: AsyncEngine) -> str | None:
    """The key that `HandOver` uses; None if it can take no part."""
    return config.hand_over_key if no_hand_over(config, engine) is None else None


@dataclass
class HandOverCounts:
    """Counters since the start. Seconds are those from asking to the last block. shared: received through shared
    memory. fallbacks: by reason."""

    sent: int = 0
    sent_blocks: int = 0
    sent_bytes: int = 0
    received: int = 0
    received_blocks: int = 0
    received_bytes: int = 0
    received_s: float = 0.0
    shared: int = 0
    fallbacks: collections.Counter[str] = field(default_factory=collections.Counter)


class _Fallback(Exception):
    """The blocks did not come. reason: a label of the metric."""

    def __init__(self, reason: str, why: str) -> None:
        super().__init__(why)
        self.reason = reason


class HandOver:
    """Both sides of one server; lives on its event loop. key: None if it takes no part.

    most_at_once: hand-overs at a time, per side, that hold parts of a text's blocks in memory. Others wait.
    """

    def __init__(
        self, engine: AsyncEngine, lanes: Lanes, role: Role, key: str | None, timeout_s: float, most_at_once: int
    ) -> None:
        self.role, self.counts = role, HandOverCounts()
        self._engine, self._lanes, self.timeout_s = engine, lanes, timeout_s
        self._key = None if key is None else key.encode()
        able = key is not None
        self.sends, self.receives = able and role != "decode", able and role != "prefill"
        self.identity = kv_identity(engine.path) if able else ""
        self.piece_bytes = max(PIECE_BYTES, least_part_bytes(engine.engine))
        self.sending, self._receiving = asyncio.Semaphore(most_at_once), asyncio.Semaphore(most_at_once)
        self._most_memories, self._num_memories = most_at_once, 0
        self._upstreams: dict[str, Upstream] = {}
        self._apart: dict[str, float] = {}
        """Servers of this host whose memory could not be opened here, and when to try again."""
        self._said_at = -_SAID_EVERY_S

    def allows(self, shown: bytes) -> bool:
        """Whether this is the key; compared in constant time."""
        return self._key is not None and hmac.compare_digest(shown, self._key)

    def facts(self) -> dict[str, str]:
        """What a router needs to join servers, for /v1/models; nothing if this one takes no part."""
        return {"role": self.role, "blocks": self.identity} if self.sends or self.receives else {}

    async def prepare(self, request: Request, requests: Sequence[EngineRequest]) -> Sequence[EngineRequest]:
        """Fetches KV blocks for engine requests, if a router says where; returns them with the time that is left.

        Tells the router, if it asks, when that has ended, well or not. Raises ClientGone if the client leaves
        meanwhile, and nothing else.
        """
        url = request.headers.get(URL_HEADER)
        if url is None or not requests or self._key is None:
            return requests
        began = time.monotonic()
        # Half of a request's time is left to compute the prompt after all.
        limit_s = min([self.timeout_s, *(one.deadline_s / 2 for one in requests if one.deadline_s is not None)])
        try:
            prompt = self._prompt(request, requests)
            async with asyncio.timeout(limit_s):
                await until_gone(request, lambda: None, self._receive(url, prompt))
        except _Fallback as fallback:
            self._note(fallback.reason, f"{url}: {fallback}")
        except TimeoutError:
            self._note("timeout", f"{url}: no blocks within {limit_s:g} s")
        tell: Callable[[], None] | None = request.scope.get(INTERIM)
        if tell is not None and request.headers.get(INTERIM_HEADER) is not None:
            tell()
        took_s = time.monotonic() - began
        return [
            one if one.deadline_s is None else dataclasses.replace(one, deadline_s=max(1e-3, one.deadline_s - took_s))
            for one in requests
        ]

    @contextlib.contextmanager
    def given_memory(self, wanted: bool) -> Iterator[GivenMemory | None]:
        """Memory for the blocks of one answer; None if it is not wanted or not to be had, so they go over TCP."""
        memory = None
        if wanted and self._num_memories < self._most_memories:
            with contextlib.suppress(OSError):
                memory = GivenMemory(self.piece_bytes)
        if memory is None:
            yield None
            return
        self._num_memories += 1
        try:
            yield memory
        finally:
            self._num_memories -= 1
            memory.close()

    def close(self) -> None:
        """Closes all connections."""
        for upstream in self._upstreams.values():
            upstream.abort_all()
        self._upstreams.clear()

    def _prompt(self, request: Request, requests: Sequence[EngineRequest]) -> npt.NDArray[np.int32]:
        """The text that all requests begin with. Raises _Fallback if blocks of it cannot be fetched."""
        if not self.receives:
            raise _Fallback("role", "this server has --role prefill and takes no blocks")
        if not self.allows(request.headers.get(KEY_HEADER, "").encode("utf-8", "replace")):
            raise _Fallback("key", "the router has another --hand-over-key")
        first = requests[0]
        if any(one.adapter for one in requests):
            raise _Fallback("adapter", "blocks of adapters are not handed over")
        if any(one.placed for one in requests):
            raise _Fallback("images", "blocks of images are not handed over")
        if any(one.prompt_token_ids != first.prompt_token_ids for one in requests[1:]):
            raise _Fallback("batch", "the request has several prompts")
        same = first.given_token_ids if len(requests) == 1 else ()
        return np.array((*first.prompt_token_ids, *same), np.int32)

    async def _receive(self, url: str, prompt: npt.NDArray[np.int32]) -> None:
        try:
            await self._fetch(url, prompt)
        except (ReplicaLost, UrlError, UnicodeError) as error:
            raise _Fallback("lost", str(error)) from error
        except FrameError as error:
            raise _Fallback("damaged", str(error)) from error
        except LlmcError as error:
            raise _Fallback("damaged" if error.name in _OF_BLOCKS else "engine", str(error)) from error
        except ServerStopping as error:
            raise _Fallback("stopping", str(error)) from error

    async def _fetch(self, url: str, prompt: npt.NDArray[np.int32]) -> None:
        engine = self._engine
        # The last token is always computed, and a block is handed over whole.
        wanted = (len(prompt) - 1) // engine.block_size
        tokens = prompt[: wanted * engine.block_size]
        text = await engine.aside(partial(HandedText, engine.engine, tokens))
        cached = await engine.beside_steps(text.num_cached)
        if cached >= wanted:
            return
        began = time.monotonic()
        answer, memory = await self._answer(url, tokens, cached)
        try:
            reached = await self._enter(answer, memory, text, cached)
            if reached < wanted:
                raise _Fallback("partial", f"{reached} of {wanted} blocks came, or had room")
        finally:
            answer.close()
        self.counts.received += 1
        self.counts.shared += memory is not None
        self.counts.received_s += time.monotonic() - began

    async def _answer(
        self, url: str, tokens: npt.NDArray[np.int32], first_block: int
    ) -> tuple[Answer, TakenMemory | None]:
        """The answer of a prefill server, and the memory through which its blocks come, if not by the answer itself.

        Raises _Fallback, ReplicaLost and UrlError.
        """
        assert self._key is not None
        headers = [(b"authorization", b"Bearer " + self._key), (b"content-type", b"application/json")]
        upstream = self._upstream(url)
        shares = upstream.address.is_loopback and time.monotonic() >= self._apart.get(url, 0.0)
        while True:
            asked = await self._lanes.run(partial(self._asked, tokens, first_block, shares), len(tokens))
            answer = await upstream.request("POST", PATH.encode(), headers, asked)
            try:
                if answer.status != 200:
                    raise _Fallback("refused", f"status {answer.status}: {await _beginning(answer)}")
                address = answer.header(ADDRESS_HEADER.encode()).decode("ascii", "replace")
                if not shares or not address:
                    return answer, None
                return answer, TakenMemory(address, self.piece_bytes)
            except (OSError, ValueError) as error:
                answer.close()
                log.info("blocks of %s come over TCP, since its memory cannot be shared: %s", url, error)
                if len(self._apart) >= _MOST_SERVERS:
                    self._apart.clear()
                self._apart[url] = time.monotonic() + _APART_S
                shares = False
            except BaseException:
                answer.close()
                raise

    def _asked(self, tokens: npt.NDArray[np.int32], first_block: int, memory: bool) -> bytes:
        body = {"identity": self.identity, "token_ids": tokens.tolist(), "first_block": first_block, "memory": memory}
        return json.dumps(body).encode()

    async def _enter(self, answer: Answer, memory: TakenMemory | None, text: HandedText, first_block: int) -> int:
        """Enters the blocks of a body part by part; returns how many leading blocks of the text are cached then.

        Raises _Fallback, FrameError, LlmcError and ReplicaLost. Each part must bring the text further, so that a peer
        cannot keep the engine busy.
        """
        reader, end, reached = FrameReader(self.piece_bytes), first_block, first_block
        has_turn = False  # only from the first byte of a part to its last: parts may be long in coming
        try:
            async for piece in answer.pieces():
                if not has_turn:
                    has_turn = await self._receiving.acquire()
                for frame in reader.feed(piece):
                    data = frame if memory is None else memory.part(frame)
                    num_blocks = blocks_of_part(data)
                    if num_blocks < 1:
                        raise FrameError("a part has no blocks")
                    end += num_blocks
                    if memory is None:
                        await self._engine.aside(partial(text.check, data))
                    now = await self._engine.beside_steps(partial(text.enter, data))
                    if memory is not None:
                        memory.release()
                    self.counts.received_bytes += len(data)
                    self.counts.received_blocks += max(0, now - reached)
                    reached = now
                    if reached < end:
                        raise _Fallback("partial", f"block {reached} had no room, or blocks before it were dropped")
                if not reader.within_frame:
                    self._receiving.release()
                    has_turn = False
        finally:
            if has_turn:
                self._receiving.release()
        if not reader.ended:
            raise _Fallback("lost", "the body is cut short")
        return reached

    def _upstream(self, url: str) -> Upstream:
        """Connections to a server, kept for the next request. Raises UrlError."""
        found = self._upstreams.pop(url, None) or Upstream(url)
        self._upstreams[url] = found
        while len(self._upstreams) > _MOST_SERVERS:
            self._upstreams.pop(next(iter(self._upstreams))).abort_all()
        return found

    def _note(self, reason: str, why: str) -> None:
        self.counts.fallbacks[reason] += 1
        now = time.monotonic()
        if now - self._said_at >= _SAID_EVERY_S:
            self._said_at = now
            log.warning("a prompt is computed here, since its blocks did not come from %s", why)


async def _beginning(answer: Answer) -> str:
    """The first characters of an error's body."""
    said = b""
    async for piece in answer.pieces():
        said += piece[: _MOST_SAID - len(said)]
        if len(said) == _MOST_SAID:
            break
    return said.decode("utf-8", "replace")
