"""Slots of states through the C ABI: what a replayer takes, what it keeps and copies, and how many an engine has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmc.runtime.binding import Artifact, Engine, LlmcError, Replayer
from llmc.runtime.simulation.engine import Curve, SimulatedEngine, SimulatedGraph

from support.state_artifact import state_artifact

TOKENS = 20
Logits = np.ndarray[Any, np.dtype[np.float32]]


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory, kernel_cache: Path) -> Path:
    return state_artifact(tmp_path_factory, kernel_cache)


def step(replayer: Replayer, start: int, count: int, slots: tuple[int, int, int] | None) -> Logits:
    """The next tokens of a text, whose keys and values are in the blocks from 1 on."""
    positions = np.arange(start, start + count)
    blocks = np.arange(1, 4)
    batch: dict[str, Any] = {
        "input_ids": 3 + positions * 7 % 100,
        "positions": positions,
        "slot_mapping": blocks[positions // 16] * 16 + positions % 16,
        "block_tables": blocks[None],
        "context_lens": [start + count],
        "query_start": [0, count],
        "sample_index": [count - 1],
        "state_slots": None if slots is None else [slots],
    }
    return replayer.run(0, **batch)


def test_a_state_goes_on_from_where_it_was_kept_or_copied(artifact: Path) -> None:
    with Artifact(artifact) as opened, Replayer(opened, num_blocks=3, num_states=4) as replayer:
        assert replayer.has_states
        whole = step(replayer, 0, TOKENS + 1, (1, 0, 0))
        step(replayer, 0, TOKENS + 5, (2, TOKENS, 3))
        replayer.copy_state(3, 4)
        for slot in (3, 4):
            np.testing.assert_array_equal(step(replayer, TOKENS, 1, (slot, 0, 0)), whole)
        assert not np.array_equal(step(replayer, TOKENS, 1, (2, 0, 0)), whole)  # a token later than it should be
        assert replayer.own_slots(range(1, 3)) is not None


def test_slots_that_cannot_be(artifact: Path) -> None:
    with Artifact(artifact) as opened:
        with Replayer(opened, num_blocks=3) as replayer:  # as many slots as sequences of the largest graph
            with pytest.raises(LlmcError, match="state_slots is missing and layers of this model have a state"):
                step(replayer, 0, 1, None)
            with pytest.raises(LlmcError, match=r"state_slots\[0\] is 4, outside 0 … 3"):
                step(replayer, 0, 1, (4, 0, 0))
            with pytest.raises(LlmcError, match="state_slots has slot 1 twice"):
                step(replayer, 0, 1, (1, 1, 1))
            with pytest.raises(LlmcError, match="cannot copy states of slot 1 to 4; the pool has 4 slots"):
                replayer.copy_state(1, 4)
            step(replayer, 0, 1, (3, 0, 0))
        with pytest.raises(LlmcError, match="num_states with the dummy slot is 4294967295, outside 2"):
            Replayer(opened, num_states=2**32 - 2)


def test_an_engine_has_the_pools_that_were_told(artifact: Path) -> None:
    with Artifact(artifact) as opened:
        info = opened.info
        assert 0 < info.state_bytes < 2**31 < info.max_states * info.state_bytes
        sizes = opened.pool_sizes(kv_bytes=20 * info.state_bytes + 40 * info.kv_block_bytes, max_num_seqs=2)
        assert sizes.num_states == 6
        given: tuple[dict[str, Any], ...]
        given = ({}, {"num_states": 3}, {"num_blocks": 9}, {"kv_bytes": 1 << 20}, {"max_num_seqs": 2})
        for options in given:
            told = opened.pool_sizes(**options)
            with Engine(opened, num_threads=1, **options) as engine:
                assert engine.stats.num_blocks == told.num_blocks
                if engine.stats.num_states:  # the engine counts them
                    assert engine.stats.num_states == told.num_states
        given = ({"kv_bytes": 5}, {"num_states": 2**32 - 1}, {"num_states": 2**32 + 5}, {"max_num_seqs": -1})
        for options in given:
            with pytest.raises(LlmcError) as refused:
                opened.pool_sizes(**options)
            with pytest.raises(LlmcError) as caught:
                Engine(opened, num_threads=1, **options)
            assert str(caught.value) == str(refused.value)


def test_a_simulated_model_may_have_states() -> None:
    graph = SimulatedGraph("decode", 2, 64, 2, 2, 2, 4, Curve((1,), (1.0,), 0.0), Curve((1,), (1.0,), 0.0))
    sizes: dict[str, Any] = {"block_size": 16, "max_model_len": 64, "max_num_seqs": 2, "kv_block_bytes": 100}
    with SimulatedEngine([graph], **sizes, state_bytes=500, kv_bytes=3000) as engine:
        assert engine.stats.num_blocks == 30 - 3 * 5 - 1
    with pytest.raises(LlmcError, match="num_states is 2 but no layer of this model has a state"):
        SimulatedEngine([graph], **sizes, num_states=2)
