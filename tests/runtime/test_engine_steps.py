"""What goes on behind steps that failed, with an engine whose steps are a script."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from llmc.runtime.binding.handle import ERROR_NAMES, LlmcError
from llmc.runtime.engine_loop import EngineLoop
from llmc.runtime.engine_steps import EngineSteps
from llmc.runtime.request_error import RequestError
from llmc.runtime.vector_runs import run_vectors


def error_of(name: str) -> LlmcError:
    return LlmcError(ERROR_NAMES.index(name), f"it is {name}")


class ScriptedEngine:
    """Its steps, one after the other: "run" on the device, "tell" events only, or fail with an error of that name.

    A step that fails fails the `failing` requests that came first; the steps after the script find nothing to do.
    """

    def __init__(self, script: Iterable[str], failing: int = 0) -> None:
        self.stats = SimpleNamespace(num_steps=0)
        self.live: list[int] = []
        self.cancelled: list[int] = []
        self._script, self._failing, self._events = iter(script), failing, list[Any]()

    def submit(self, ids: Any, params: Any, vector: np.ndarray) -> int:
        self.live.append(len(self.live))
        return self.live[-1]

    def step(self) -> bool:
        what = next(self._script, None)
        if what == "run":
            self.stats.num_steps += 1
        elif what not in (None, "tell"):
            failed, self.live = self.live[: self._failing], self.live[self._failing :]
            told = {"kind": "failed", "finish_reason": "error", "error_message": f"it is {what}"}
            self._events += [SimpleNamespace(request_id=one, **told) for one in failed]
            raise error_of(what)
        return what is not None

    def poll(self) -> list[Any]:
        events, self._events = self._events, []
        return events

    def cancel(self, request_id: int) -> None:
        if request_id not in self.live:
            raise error_of("not_found")
        self.live.remove(request_id)
        self.cancelled.append(request_id)


@pytest.mark.parametrize("between", ["tell", "run"])
def test_only_a_step_that_ran_ends_a_row_of_failures(between: str) -> None:
    told: list[str] = []
    engine = ScriptedEngine(["device_failed", between, "out_of_memory", between, "device_failed", between])
    steps = EngineSteps(engine, lambda error: told.append(error.name))
    assert [steps.step() for _ in range(4)] == [True] * 4
    if between == "tell":
        with pytest.raises(LlmcError, match="it is device_failed"):
            steps.step()
    else:
        assert steps.step()
    assert steps.step()
    assert not steps.step()
    assert (steps.num_failed, told[:2]) == (3, ["device_failed", "out_of_memory"])


def test_no_engine_survives_other_errors() -> None:
    steps = EngineSteps(ScriptedEngine(["device_lost"]))
    with pytest.raises(LlmcError, match="it is device_lost"):
        steps.step()
    assert steps.num_failed == 1


def test_prompts_of_a_failed_step_are_an_error_and_the_others_are_cancelled() -> None:
    """Two fail in one step, and the cancellations are processed by a step that fails, too."""
    engine = ScriptedEngine(["run", "device_failed", "device_failed", "tell"], failing=2)
    with pytest.raises(RequestError, match="prompt 0: it is device_failed"):
        run_vectors(engine, EngineSteps(engine), [[1]] * 5, 4, 5)
    assert (engine.live, engine.cancelled, engine.step()) == ([], [2, 3, 4], False)


def test_a_run_is_abandoned_although_its_last_step_fails() -> None:
    engine = ScriptedEngine(["device_failed", "tell"])
    engine.live = [7, 8]
    loop = EngineLoop(engine, EngineSteps(engine), 1)
    job: Any = None
    loop._jobs = {7: (job, []), 8: (job, [])}
    loop._abandon([7, 8])
    assert (engine.cancelled, engine.step()) == ([7, 8], False)
