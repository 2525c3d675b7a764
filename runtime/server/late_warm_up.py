"""The rest of a warm-up, behind the traffic of a server that already takes requests."""

from __future__ import annotations

import asyncio
import time

from llmc.runtime.server.async_engine import AsyncEngine
from llmc.runtime.warm_up.warm_up import OnWarmStep, WarmUp

# While requests run, at most this share of the time goes to graphs that no request needs yet.
_BUSY_SHARE = 0.05
_LOOK_S = 0.05


async def finish_behind_traffic(warm_up: WarmUp, engine: AsyncEngine, on_step: OnWarmStep | None) -> None:
    """Replays the remaining graphs: at once while no request runs, otherwise now and then between two steps. Ends early
    once `warm_up.stopped` is set. Raises LlmcError, and ServerStopping when the engine ends."""
    while not (warm_up.stopped or warm_up.done):
        began = time.monotonic()
        # An idle engine looks for work only now and then.
        step = await (
            engine.between_steps(warm_up.advance) if engine.num_active else asyncio.to_thread(warm_up.advance)
        )
        resume = time.monotonic() + (time.monotonic() - began) / _BUSY_SHARE
        if step is not None and on_step is not None:
            await asyncio.to_thread(on_step, step)
        while engine.num_active and time.monotonic() < resume and not warm_up.stopped:
            await asyncio.sleep(_LOOK_S)
