"""Layers with states, divided among stages: rank 0 passes copies of slots on to the stages behind it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmc.runtime.binding import Artifact, Engine, Replayer, SamplingParams

from support.artifacts import made_once
from support.compiled import compile_tiny
from support.engine_driver import bits, drive, greedy, random_ids
from support.tiny_models import make_tiny_model

pytestmark = pytest.mark.native
TOKENS = 20
Logits = np.ndarray[Any, np.dtype[np.float32]]


@pytest.fixture(scope="module")
def staged(tmp_path_factory: pytest.TempPathFactory, kernel_cache: Path) -> dict[int, Path]:
    """By number of stages, of which each has a layer with a state."""

    def make(folder: Path) -> None:
        layers = ["conv", "full_attention", "conv", "conv"]
        model = make_tiny_model(folder / "model", "lfm2", num_hidden_layers=4, layer_types=layers)
        ladder = "prefill=[1,2]x[32],decode=[1,4]x[96],mixed=[4]x[32]"
        options: dict[str, Any] = {"buckets": ladder, "dtype": "f32", "block_size": 16, "tokenizer": "none"}
        for stages in (1, 2):
            compile_tiny(model, folder / str(stages), kernel_cache, pipeline_parallel=stages, **options).close()

    folder = made_once(tmp_path_factory, "staged-states", make)
    return {stages: folder / str(stages) for stages in (1, 2)}


def step(replayer: Replayer, start: int, count: int, slots: tuple[int, int, int]) -> Logits:
    """Of the last token of a text's part, whose keys and values are in the blocks from 1 on."""
    positions = np.arange(start, start + count)
    blocks = np.arange(1, 4)
    return replayer.run(
        0,
        input_ids=3 + positions * 7 % 100,
        positions=positions,
        slot_mapping=blocks[positions // 16] * 16 + positions % 16,
        block_tables=blocks[None],
        context_lens=[start + count],
        query_start=[0, count],
        sample_index=[count - 1],
        state_slots=[slots],
    ).copy()


def test_a_copied_state_is_that_of_every_stage(staged: dict[int, Path]) -> None:
    with Artifact(staged[1]) as artifact, Replayer(artifact, num_threads=1, num_blocks=3) as replayer:
        whole = step(replayer, 0, TOKENS + 1, (1, 0, 0))
    with Artifact(staged[2]) as artifact, Replayer(artifact, num_threads=1, num_blocks=3, num_states=4) as replayer:
        step(replayer, 0, TOKENS, (2, 0, 0))
        replayer.copy_state(2, 4)
        step(replayer, TOKENS, 1, (2, 0, 0))  # the copy is not this slot
        np.testing.assert_array_equal(step(replayer, TOKENS, 1, (4, 0, 0)), whole)


def test_stages_change_no_bit_of_what_goes_on_from_copies(staged: dict[int, Path]) -> None:
    """Of continuations of one prompt, of beams, and of texts from the prefix cache."""
    shared = random_ids(5, 40)
    params = [
        SamplingParams(max_tokens=10, temperature=0.9, seed=3, n=3, ignore_eos=True),
        SamplingParams(max_tokens=10, n=3, beam_width=3, ignore_eos=True),
        greedy(10),
    ]
    requests = [([*shared[: 36 + i], 7 + i], one) for i, one in enumerate(params)]
    found: dict[int, list[Any]] = {}
    for stages, path in staged.items():
        with Artifact(path) as artifact, Engine(artifact, num_threads=1) as engine:
            rounds = [drive(engine, [request]) for request in requests for _ in range(2)]
            found[stages] = [[bits(one) for one in outputs] for (outputs,) in rounds]
            assert all(outputs[0].num_cached == 32 for (outputs,) in rounds[1::2])
            if stages > 1:
                assert engine.device_stats()["working_ranks"] == stages
    assert found[2] == found[1]
    assert found[1][::2] == found[1][1::2]
