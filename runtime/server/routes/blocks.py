"""/v1/llmc/blocks: KV blocks of a prompt for a decode server. Internal: only holders of the hand-over key may ask."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from functools import partial

import numpy as np
import numpy.typing as npt
from fastapi import APIRouter, Request
from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from llmc.runtime.params import SamplingParams

from .. import answers
from ..block_frames import END, framed
from ..bodies import json_route
from ..context import ServerContext
from ..errors import ApiError
from ..event_stream import until_gone
from ..hand_over import PATH
from ..prompts import check_prompt
from ..protocol.blocks import BlocksRequest
from ..requests import ClientGone, EngineRequest


class _BlockBody(Response):
    """Sends frames as they are made, when it is its turn."""

    media_type = "application/octet-stream"

    def __init__(self, frames: AsyncIterator[bytes], turn: asyncio.Semaphore) -> None:
        super().__init__()
        del self.headers["content-length"]
        self._frames, self._turn = frames, turn

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with contextlib.suppress(ClientGone):  # nobody reads an answer
            await until_gone(Request(scope, receive), lambda: None, self._give(send))

    async def _give(self, send: Send) -> None:
        async with self._turn:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            async for frame in self._frames:
                await send({"type": "http.response.body", "body": frame, "more_body": True})
            await send({"type": "http.response.body", "body": END, "more_body": False})


def router(server: ServerContext) -> APIRouter:
    """The endpoint. It is not in the OpenAPI document, as it is not for clients."""
    routes = APIRouter(route_class=json_route(server.lanes.bodies), include_in_schema=False)
    hand_over = server.hand_over

    @routes.post(PATH, response_model=None)
    async def give_blocks(body: BlocksRequest, request: Request) -> Response:
        """Computes a text whose blocks are not cached, and gives the blocks."""
        server.check_ready()
        if body.identity != hand_over.identity:
            message = "the KV blocks differ: use the same weights, target, options and version of llmc on both servers"
            raise ApiError(message, status=409, code="other_blocks")
        check_prompt(server, body.token_ids)
        ids = tuple(body.token_ids)
        text = await server.lanes.run(partial(np.array, ids, np.int32), len(ids))
        await _compute(server, request, ids, text)
        return _BlockBody(_frames(server, text, body.first_block), hand_over.sending)

    return routes


async def _compute(server: ServerContext, request: Request, ids: tuple[int, ...], text: npt.NDArray[np.int32]) -> None:
    """Brings the blocks of a text into the prefix cache. Raises ClientGone, ApiError and what a submission raises."""
    engine = server.engine
    cached = await engine.beside_steps(partial(engine.engine.num_cached_blocks, text))
    if cached >= len(text) // engine.block_size:
        return
    params = SamplingParams(max_tokens=1, temperature=0.0)
    asked = EngineRequest(answers.new_id("blocks"), ids, params)
    (stream,) = answers.submit(server, [asked])
    await until_gone(request, stream.close, answers.gather(stream))


async def _frames(server: ServerContext, text: npt.NDArray[np.int32], first_block: int) -> AsyncIterator[bytes]:
    """The blocks that are cached, part by part."""
    engine, counts, most = server.engine, server.hand_over.counts, server.hand_over.piece_bytes
    counts.sent += 1
    while True:
        part = await engine.beside_steps(partial(engine.engine.export_blocks, text, first_block, most))
        if not part.num_blocks:
            return
        first_block += part.num_blocks
        counts.sent_blocks += part.num_blocks
        counts.sent_bytes += len(part.data)
        yield framed(part.data)
