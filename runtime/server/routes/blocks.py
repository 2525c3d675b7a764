"""/v1/llmc/blocks: KV blocks of a prompt for a decode server. Internal: only holders of the hand-over key may ask."""

from __future__ import annotations

import asyncio
import contextlib
import time
from functools import partial

from fastapi import APIRouter, Request
from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from llmc.runtime.binding.hand_over import HandedBlocks, HandedText
from llmc.runtime.params import SamplingParams

from .. import answers
from ..block_frames import END, length_of
from ..bodies import json_route
from ..context import ServerContext
from ..errors import ApiError
from ..event_stream import until_gone
from ..hand_over import PATH
from ..prompts import check_prompt
from ..protocol.blocks import BlocksRequest
from ..request_stream import RequestStream
from ..requests import ClientGone, EngineRequest
from ..shared_blocks import ADDRESS_HEADER, SLOTS, GivenMemory

# Parts that leave between two steps, and the time that steps wait for all but the last of them.
_MOST_PARTS, _MOST_COPYING_S = 4, 0.002
_LOOK_S, _MOST_LOOK_S = 0.001, 0.02


class _BlockBody(Response):
    """Sends the blocks of a text, part by part, as they are computed.

    The head of the answer is sent with the first part. So a text that cannot be computed gets an error for an answer,
    and later the body is cut off.
    """

    media_type = "application/octet-stream"

    def __init__(
        self, server: ServerContext, text: HandedText, body: BlocksRequest, stream: RequestStream | None
    ) -> None:
        """stream: the request that computes the text; None if all of it is cached."""
        super().__init__()
        del self.headers["content-length"]
        self._engine, self._hand_over = server.engine, server.hand_over
        self._text, self._next_block, self._stream = text, body.first_block, stream
        self._wants_memory = body.memory
        self._memory: GivenMemory | None = None
        self._started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with contextlib.suppress(ClientGone), self._hand_over.given_memory(self._wants_memory) as self._memory:
            # When the client has gone, nobody reads an answer.
            await until_gone(Request(scope, receive), self._close, self._give(send))

    def _close(self) -> None:
        if self._stream is not None:
            self._stream.close()

    async def _give(self, send: Send) -> None:
        self._hand_over.counts.sent += 1
        computed = asyncio.ensure_future(self._computed())
        # Nobody may ask how it ended; asyncio would log that.
        computed.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
        try:
            whole = await self._give_parts(send, computed)
        finally:
            computed.cancel()
        error = computed.exception() if computed.done() and not computed.cancelled() else None
        if error is not None and not self._started:
            raise error
        await self._start(send)
        await send({"type": "http.response.body", "body": END if whole and error is None else b"", "more_body": False})

    async def _give_parts(self, send: Send, computed: asyncio.Future[None]) -> bool:
        """Sends parts as they are there, until all is computed, well or not. False: the client takes no more."""
        while True:
            if not await self._until_free(1):
                return False
            if self._started and self._memory is None:
                # Waits until the client has taken most of what was sent: a slow one must not keep a turn meanwhile.
                await send({"type": "http.response.body", "body": b"", "more_body": True})
            # Asked before the look for blocks: what is computed later is found by another look.
            all_computed = computed.done()
            async with self._hand_over.sending:
                parts = await self._engine.beside_steps(self._next_parts)
                for part in parts:
                    await self._send(send, part)
            if not parts and all_computed:
                # The client opens the memory when it has the first part; it must be there until then.
                return await self._until_free(SLOTS)
            if not parts:
                await asyncio.wait({computed, self._engine.next_step()}, return_when=asyncio.FIRST_COMPLETED)

    async def _until_free(self, num_slots: int) -> bool:
        """Waits until the client has taken parts out of the memory; False if that takes too long."""
        until, pause = time.monotonic() + self._hand_over.timeout_s, _LOOK_S
        while self._memory is not None and self._memory.num_free < num_slots:
            if time.monotonic() > until:
                return False
            await asyncio.sleep(pause)
            pause = min(2 * pause, _MOST_LOOK_S)
        return True

    async def _computed(self) -> None:
        """Raises ApiError and RequestFailed."""
        if self._stream is not None:
            await answers.gather(self._stream)

    def _next_parts(self) -> list[HandedBlocks]:
        """Runs between two steps: a step may compute more than one part holds, and none leaves while it runs."""
        parts: list[HandedBlocks] = []
        memory, until = self._memory, time.monotonic() + _MOST_COPYING_S
        while len(parts) < (_MOST_PARTS if memory is None else memory.num_free):
            into = None if memory is None else memory.slot(len(parts))
            part = self._text.export(self._next_block, self._hand_over.piece_bytes, into)
            if not part.num_blocks:
                break
            self._next_block += part.num_blocks
            parts.append(part)
            if time.monotonic() >= until:
                break
        return parts

    async def _start(self, send: Send) -> None:
        if not self._started:
            self._started = True
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})

    async def _send(self, send: Send, part: HandedBlocks) -> None:
        data: bytes | memoryview
        if self._memory is None:
            await self._engine.aside(partial(self._text.seal, part))
            data = part.data
        else:
            data = self._memory.give(len(part.data))
            self.headers[ADDRESS_HEADER] = self._memory.address  # of no use once the head has been sent
        await self._start(send)
        await send({"type": "http.response.body", "body": length_of(data), "more_body": True})
        await send({"type": "http.response.body", "body": data, "more_body": True})
        counts = self._hand_over.counts
        counts.sent_blocks += part.num_blocks
        counts.sent_bytes += len(part.data)


def router(server: ServerContext) -> APIRouter:
    """The endpoint. It is not in the OpenAPI document, as it is not for clients."""
    routes = APIRouter(route_class=json_route(server.lanes.bodies), include_in_schema=False)
    engine, hand_over = server.engine, server.hand_over

    @routes.post(PATH, response_model=None)
    async def give_blocks(body: BlocksRequest) -> Response:
        """Computes a text whose blocks are not cached, and gives the blocks meanwhile."""
        server.check_ready()
        if body.identity != hand_over.identity:
            message = "the KV blocks differ: use the same weights, target, options and version of llmc on both servers"
            raise ApiError(message, status=409, code="other_blocks")
        check_prompt(server, body.token_ids)
        ids = tuple(body.token_ids)
        text = await engine.aside(partial(HandedText, engine.engine, ids))
        cached = await engine.beside_steps(text.num_cached)
        stream = None if cached >= len(ids) // engine.block_size else _compute(server, ids)
        return _BlockBody(server, text, body, stream)

    return routes


def _compute(server: ServerContext, ids: tuple[int, ...]) -> RequestStream:
    """Brings the blocks of a text into the prefix cache. Raises what a submission raises."""
    params = SamplingParams(max_tokens=1, temperature=0.0)
    (stream,) = answers.submit(server, [EngineRequest(answers.new_id("blocks"), ids, params)])
    return stream
