"""Requests that come and go while steps are on their way, on a device that may fail."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from llmc.runtime.binding import Engine, LlmcError

from support.engine_driver import Output, bits


def arrive_late(
    engine: Engine, requests: list[Any], seed: int, failures: tuple[str, ...] = ()
) -> dict[int, list[tuple[Any, ...]]]:
    """Requests come and are cancelled while steps are on their way, evict each other, and have blocks swapped. Returns
    the bits of each. failures: errors that steps may end with."""
    rng, left, doomed = np.random.default_rng(seed), list(range(len(requests))), list[int]()
    which: dict[int, int] = {}
    found: dict[int, list[Output]] = {}
    progressed = True
    while left or progressed:
        if left and rng.random() < 0.4:
            index = left.pop(int(rng.integers(len(left))))
            prompt, params, adapter = requests[index]
            submitted = engine.submit(prompt, params, adapter=adapter, priority=int(rng.integers(-1, 2)))
            which[submitted], found[submitted] = index, [Output() for _ in range(params.n)]
            doomed.append(engine.submit(prompt[:20], params, max_tokens=60))
        if doomed and rng.random() < 0.3:
            with contextlib.suppress(LlmcError):  # it may have ended
                engine.cancel(doomed.pop(0))
        try:
            progressed = engine.step()
        except LlmcError as error:
            if error.name not in failures:
                raise
            progressed = True
        engine.check_integrity()
        for event in engine.poll():
            if event.request_id not in found:
                continue
            output = found[event.request_id][event.output_index]
            assert output.reason is None, "an event after the end"
            if event.kind == "token":
                output.ids.append(event.token_id)
                output.logprobs.append(event.logprob)
                output.top.append(event.top_logprobs)
            else:
                assert event.kind == "finished" or (event.finish_reason == "error" and failures), event.error_message
                output.reason = event.finish_reason
    assert len(found) == len(requests)
    assert all(output.reason for outputs in found.values() for output in outputs)
    return {which[submitted]: [bits(output) for output in outputs] for submitted, outputs in found.items()}


def check_answered(
    found: Mapping[int, Sequence[tuple[Any, ...]]], alone: Sequence[Sequence[tuple[Any, ...]]]
) -> list[str]:
    """Checks that requests have the bits of an undisturbed run, as far as they were answered. Gives how each ended."""
    reasons = []
    for index, outputs in found.items():
        for one, other in zip(outputs, alone[index], strict=True):
            reasons.append(one[-1])
            whole = other if one[-1] != "error" else (*(part[: len(one[0])] for part in other[:-1]), "error")
            assert one == whole, index
    return reasons


def fail_by_chance(
    engine: Engine,
    requests: list[Any],
    alone: Sequence[Sequence[tuple[Any, ...]]],
    tell_driver: Callable[[str], None],
    *,
    one_in: int,
) -> list[str]:
    """Has one call in so many fail, thrice, and none then. Checks bits, and that all is given back. Gives how requests
    ended while calls failed. tell_driver: sets what fails."""
    reasons = list[str]()
    for seed in range(3):
        tell_driver(f"one_in={one_in} seed={seed}")
        reasons += check_answered(arrive_late(engine, requests, seed, ("device_failed", "out_of_memory")), alone)
        assert engine.stats.num_free_blocks == engine.stats.num_blocks
    tell_driver("")
    assert arrive_late(engine, requests, 7) == dict(enumerate(alone))
    return reasons
