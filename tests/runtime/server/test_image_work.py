"""Images of requests while the server ends: no encoder is released that still runs, and each request has an answer."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llmc.runtime.images.image_prompt import ImagePrompt
from llmc.runtime.images.tower import Tower
from llmc.runtime.server.image_work import ImageWork
from llmc.runtime.server.requests import ClientGone, ServerStopping

from support.image_forms import SMOLVLM, HeldEncoder, form_of, picture


class _Client:
    """In place of a request: of a client that stays until `leave` is set."""

    def __init__(self) -> None:
        self.leave = asyncio.Event()

    async def receive(self) -> dict[str, Any]:
        await self.leave.wait()
        return {"type": "http.disconnect"}


def _prompt(tower: Tower, seed: int) -> ImagePrompt:
    return ImagePrompt("", tower, (tower.look(picture(100, 50, seed=seed)),))


async def _begun(encoder: HeldEncoder) -> None:
    assert await asyncio.to_thread(encoder.begun.wait, 60)


def _work(tmp_path: Path) -> SimpleNamespace:
    form = form_of(tmp_path, SMOLVLM)
    encoder = HeldEncoder(form, 4)
    tower = Tower(form, encoder, "tower")
    return SimpleNamespace(encoder=encoder, tower=tower, images=ImageWork(tower, 8))


def test_the_server_stops_while_an_image_of_a_client_that_left_is_encoded(tmp_path: Path) -> None:
    async def check() -> None:
        work, client = _work(tmp_path), _Client()
        asked = asyncio.create_task(work.images.placed(client, _prompt(work.tower, 0), ()))
        await _begun(work.encoder)
        client.leave.set()
        with pytest.raises(ClientGone):
            await asked
        work.images.close()
        closing = asyncio.create_task(asyncio.to_thread(work.tower.close))
        assert not work.encoder.released
        work.encoder.go_on.set()
        await closing
        assert work.encoder.released
        assert len(work.encoder.calls) == 1

    asyncio.run(check())


def test_requests_with_images_learn_that_the_server_stops(tmp_path: Path) -> None:
    async def check() -> None:
        work = _work(tmp_path)
        asked = [asyncio.create_task(work.images.placed(_Client(), _prompt(work.tower, seed), ())) for seed in range(3)]
        await _begun(work.encoder)
        work.images.close()
        work.encoder.go_on.set()
        for task in asked:
            with pytest.raises(ServerStopping, match="is shutting down"):
                await task
        assert len(work.encoder.calls) == 1
        assert work.images.num_waiting == 0
        with pytest.raises(ServerStopping, match="is shutting down"):
            await work.images.placed(_Client(), _prompt(work.tower, 4), ())

    asyncio.run(check())
