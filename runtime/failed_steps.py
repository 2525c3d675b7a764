"""Which failed steps an engine survives."""

from __future__ import annotations

from llmc.runtime.binding.handle import LlmcError

# With any other error the engine has failed every request.
_SURVIVED = ("out_of_memory", "device_failed")
# After that many steps in a row, a device will not recover.
_MOST_IN_A_ROW = 3


class FailedSteps:
    """Counts the steps of an engine that failed. total: those so far."""

    def __init__(self) -> None:
        self.total = self._in_a_row = 0

    def survives(self, error: LlmcError) -> bool:
        """Counts a step that failed. Whether its own requests alone have failed, and steps may go on."""
        self.total += 1
        self._in_a_row += 1
        return error.name in _SURVIVED and self._in_a_row < _MOST_IN_A_ROW

    def end_row(self) -> None:
        """A step has done its work."""
        self._in_a_row = 0
