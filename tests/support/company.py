"""Bits of requests in an engine do not depend on their company."""

from __future__ import annotations

import numpy as np

from llmc.runtime.binding import Artifact, Engine

from support.engine_driver import bits, drive, mixed_requests


def check_company(artifact: Artifact) -> None:
    """Mixed steps, chunks, prefix hits, copies of blocks (n > 1), preemption and threads. The artifact has blocks of 16
    tokens, and buckets for prefill, decode and mixed steps of 8 sequences."""
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
