"""The engine's bits do not depend on company whatever the KV cache is made of: its scales go where its blocks go."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from llmc.runtime.binding import Artifact, Engine

from support.compiled import compile_tiny
from support.engine_driver import MIXED_LADDER, bits, drive, mixed_requests

pytestmark = pytest.mark.native


@pytest.mark.parametrize("kv_dtype", ["f16", "int8", "fp8_e4m3", "fp8_e5m2"])
def test_bits_do_not_depend_on_company(
    kv_dtype: str, llama: tuple[Path, Artifact], tmp_path: Path, kernel_cache: Path
) -> None:
    """Mixed steps, chunks, prefix hits, copies of blocks (n > 1), preemption and threads."""
    ladder = f"{MIXED_LADDER},mixed=[8]x[24]"
    options = {"buckets": ladder, "dtype": "f32", "kv_dtype": kv_dtype, "block_size": 16}
    artifact = compile_tiny(llama[0], tmp_path / "artifact", kernel_cache, **options)
    requests, alone = mixed_requests(), []
    for request in requests:
        with Engine(artifact, num_threads=1, num_blocks=64, prefix_cache=0) as engine:
            alone.append([bits(o) for o in drive(engine, [request])[0]])
    preempted = hit = mixed = 0
    for trial in range(6):
        rng = np.random.default_rng(trial)
        tiny_pool = trial % 2 == 1
        order = [int(i) for i in rng.permutation(len(requests))]
        with Engine(
            artifact,
            num_threads=1 + trial % 3,
            num_blocks=10 if tiny_pool else 100,
            max_num_seqs=8 if tiny_pool else int(rng.choice([3, 5, 8])),
            max_tokens_per_step=int(rng.choice([5, 10, 17])),
        ) as engine:
            for _ in range(2):  # the second round starts with a warm prefix cache
                found = drive(engine, [requests[i] for i in order])
                for i, outputs in zip(order, found, strict=True):
                    assert [bits(o) for o in outputs] == alone[i], f"trial {trial}, request {i}"
            stats = engine.stats
        preempted += stats.num_preemptions
        hit += stats.prefix_hit_tokens
        mixed += stats.num_mixed_steps
    assert preempted > 0
    assert hit > 0
    assert mixed > 0
