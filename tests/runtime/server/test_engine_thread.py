"""The engine's thread: steps, and the work of others between them."""

from __future__ import annotations

import asyncio
import threading
import time
from types import SimpleNamespace
from typing import cast

import pytest

from llmc.runtime.binding.engine import Engine
from llmc.runtime.server.engine_thread import EngineThread
from llmc.runtime.server.requests import ServerStopping


class CountingEngine:
    """Always has something to do."""

    def __init__(self) -> None:
        self.num_steps = 0

    def wait(self, timeout_s: float) -> SimpleNamespace:
        return SimpleNamespace(events=False, work=True)

    def step(self) -> int:
        self.num_steps += 1
        return 1


def test_work_that_keeps_coming_does_not_hold_up_the_next_step() -> None:
    engine = CountingEngine()
    thread = EngineThread(cast(Engine, engine), 1 << 30, lambda: None, lambda: None)

    def work() -> int:
        time.sleep(0.001)
        return engine.num_steps

    async def run() -> list[int]:
        waiting = [asyncio.ensure_future(thread.between_steps(work)) for _ in range(40)]
        await asyncio.sleep(0)  # all wait before the first step
        thread.start()
        return await asyncio.gather(*waiting)

    try:
        steps_before = asyncio.run(run())
    finally:
        thread.stop()
    assert steps_before == sorted(steps_before)
    assert max(map(steps_before.count, set(steps_before))) <= 2


class SleepingEngine:
    """Waits for a request that never comes, as it does while all requests wait for masks."""

    def __init__(self) -> None:
        self.waits = threading.Event()
        self.wakes = threading.Event()

    def wait(self, timeout_s: float) -> SimpleNamespace:
        if timeout_s > 0:
            self.waits.set()
            assert self.wakes.wait(60)
        return SimpleNamespace(events=False, work=False)


def test_no_work_waits_for_a_thread_that_sleeps() -> None:
    engine = SleepingEngine()
    thread = EngineThread(cast(Engine, engine), 1 << 30, lambda: None, lambda: None)

    async def run() -> None:
        assert thread.unless_asleep(threading.get_ident) is None  # not started
        early = asyncio.ensure_future(thread.between_steps(threading.get_ident))
        await asyncio.sleep(0)
        thread.start()
        assert await early != threading.get_ident()
        assert await asyncio.to_thread(engine.waits.wait, 60)
        assert thread.unless_asleep(threading.get_ident) is None
        engine.wakes.set()

    try:
        asyncio.run(run())
    finally:
        engine.wakes.set()
        thread.stop()
    asyncio.run(ended(thread))


async def ended(thread: EngineThread) -> None:
    queued = thread.unless_asleep(threading.get_ident)
    assert queued is not None
    with pytest.raises(ServerStopping):
        await queued
