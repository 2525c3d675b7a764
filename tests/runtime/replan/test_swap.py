"""Steps wait for nothing that an engine needs for graphs that it takes over: all of it is there beforehand."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from llmc.runtime.binding import Artifact, Engine, SamplingParams

from support.engine_driver import drive, random_ids

pytestmark = pytest.mark.native

_CHANCE = 2
"""Pages that the interpreter may take meanwhile."""


def pages_of_steps(engine: Engine) -> int:
    """Pages that this thread, who alone runs steps, took from the system during a request, after another like it."""
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    drive(engine, [(random_ids(5, 20), SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True))])
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before


def test_steps_behind_a_swap_take_no_memory_and_read_no_code(llama: tuple[Path, Artifact]) -> None:
    with Engine(llama[1], num_threads=1, num_blocks=50, weight_memory="copied") as engine:
        assert pages_of_steps(engine) > 4 * _CHANCE  # what a new engine takes shows
        assert min(pages_of_steps(engine) for _ in range(3)) <= _CHANCE
        behind_swaps = []
        for _ in range(3):
            # The same graphs again: code, inputs and logits are others.
            engine.add_graphs(Artifact(llama[0].parent / "artifact"))
            behind_swaps.append(pages_of_steps(engine))
        assert min(behind_swaps) <= _CHANCE
