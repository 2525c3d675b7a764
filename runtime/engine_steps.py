"""Steps an engine, and tells which failed steps it survives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llmc.runtime.binding.handle import LlmcError

# With any other error the engine has failed every request, and fails later ones.
_SURVIVED = ("out_of_memory", "device_failed")
# After that many steps in a row, a device will not recover.
_MOST_IN_A_ROW = 3


class EngineSteps:
    """Steps an engine, and goes on behind steps that failed. num_failed: those so far.

    Requests have failed with such a step, one event each: if the device failed or had no memory, those of the steps on
    their way; if the host's memory ran out, all that the engine had. on_failure: called for each step that the engine
    survives.
    """

    def __init__(self, engine: Any, on_failure: Callable[[LlmcError], None] | None = None) -> None:
        self.num_failed = 0
        self._engine, self._on_failure = engine, on_failure
        self._in_a_row, self._num_run = 0, -1

    def step(self) -> bool:
        """Runs one step; whether it did any work, as one that failed did. Raises LlmcError unless the engine survives
        it."""
        try:
            return bool(self._engine.step())
        except LlmcError as error:
            self.num_failed += 1
            # A step that only told of a cancelled request has asked nothing of the device, and ends no row.
            num_run = int(self._engine.stats.num_steps)
            self._in_a_row = self._in_a_row + 1 if num_run == self._num_run else 1
            self._num_run = num_run
            if error.name not in _SURVIVED or self._in_a_row >= _MOST_IN_A_ROW:
                raise
            if self._on_failure is not None:
                self._on_failure(error)
            return True


def cancel(engine: Any, request_id: int) -> None:
    """Cancels a request. One that has ended, whose events were not taken yet, is left."""
    try:
        engine.cancel(request_id)
    except LlmcError as error:
        if error.name != "not_found":
            raise
