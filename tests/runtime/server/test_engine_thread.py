"""The engine's thread: steps, and the work of others between them."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import cast

from llmc.runtime.binding.engine import Engine
from llmc.runtime.server.engine_thread import EngineThread


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
