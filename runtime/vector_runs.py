"""Prompts through an engine whose model gives vectors, in one thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from llmc.runtime.binding.events import Event
from llmc.runtime.binding.handle import LlmcError
from llmc.runtime.params import SamplingParams
from llmc.runtime.request_error import RequestError
from llmc.runtime.vector_task import Vector

from .engine_steps import EngineSteps, cancel

NO_TOKENS = SamplingParams(max_tokens=1)
"""Parameters of a request that samples no tokens."""


def run_vectors(
    engine: Any,
    steps: EngineSteps,
    prompts: Sequence[Sequence[int]],
    width: int,
    window: int,
    progress: Callable[[int, int], None] | None = None,
) -> list[Vector]:
    """The row of each prompt, in order. steps: of the engine. window: prompts in the engine at once.

    progress: called with (prompts done, all). Raises RequestError for the first prompt that the engine fails, also in a
    step that it survives; those still running are cancelled. Raises LlmcError if the engine itself has failed.
    """
    rows = [np.zeros(width, np.float32) for _ in prompts]
    running: dict[int, int] = {}
    waiting, done = iter(range(len(prompts))), 0
    try:
        while done < len(prompts):
            while len(running) < window and (index := next(waiting, None)) is not None:
                try:
                    running[engine.submit(prompts[index], NO_TOKENS, vector=rows[index])] = index
                except LlmcError as error:
                    raise RequestError(f"prompt {index}: {error}") from error
            steps.step()
            for event in engine.poll():
                if event.request_id in running and event.kind in ("finished", "failed"):
                    _check(event, running.pop(event.request_id))
                    done += 1
            if progress is not None:
                progress(done, len(prompts))
    finally:
        for request_id in running:
            cancel(engine, request_id)
        while running and steps.step():
            engine.poll()
        if running:
            engine.poll()
    return rows


def _check(event: Event, index: int) -> None:
    if event.kind == "failed" or event.finish_reason != "stop":
        raise RequestError(f"prompt {index}: {event.error_message or 'the engine gave it up'}")
