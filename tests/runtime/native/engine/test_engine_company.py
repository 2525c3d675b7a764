"""The engine gives a request the same bits in any company: batches, chunks, hits, preemption, threads, guesses."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmc.runtime.binding import Artifact, Engine, EngineStats

from support.compiled import compile_tiny
from support.engine_driver import MIXED_LADDER, Output, bits, drive, mixed_requests

pytestmark = pytest.mark.native


@pytest.fixture(scope="module")
def alone(llama: tuple[Path, Artifact]) -> list[list[tuple[Any, ...]]]:
    """Every request in an engine of its own, with one thread and no prefix cache."""
    outputs = []
    for request in mixed_requests():
        with Engine(llama[1], num_threads=1, num_blocks=64, prefix_cache=0) as engine:
            outputs.append([bits(o) for o in drive(engine, [request])[0]])
    assert len({tuple(o[0]) for of in outputs for o in of}) == sum(len(of) for of in outputs)
    return outputs


@pytest.fixture(scope="module")
def mixing(llama: tuple[Path, Artifact], kernel_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    """The same model with mixed graphs."""
    output, ladder = tmp_path_factory.mktemp("mixing") / "artifact", f"{MIXED_LADDER},mixed=[3,8]x[9,24]"
    return compile_tiny(llama[0], output, kernel_cache, buckets=ladder, dtype="f32", block_size=16)


def keep_stats(engine: Engine, steps: list[EngineStats]) -> Callable[[int], None]:
    """Appends the engine's statistics after a step."""
    return lambda _: steps.append(engine.stats)


def test_bits_do_not_depend_on_mixed_graphs(mixing: Artifact, alone: list[list[tuple[Any, ...]]]) -> None:
    """Decodes beside chunks of prompts, some of which begin in the prefix cache; every other pool is too small."""
    requests = mixed_requests()
    preempted, hit = 0, 0
    for trial in range(8):
        rng = np.random.default_rng(trial)
        tiny_pool = trial % 2 == 1
        order = [int(i) for i in rng.permutation(len(requests))]
        with Engine(
            mixing,
            num_threads=1 + trial % 3,
            num_blocks=10 if tiny_pool else 100,
            max_num_seqs=8 if tiny_pool else int(rng.choice([3, 5, 8])),
            max_tokens_per_step=10 if tiny_pool else int(rng.choice([0, 10, 17])),
        ) as engine:
            steps = [engine.stats]
            for _ in range(2):  # the second round starts with a warm prefix cache
                found = drive(engine, [requests[i] for i in order], keep_stats(engine, steps))
                for i, outputs in zip(order, found, strict=True):
                    assert [bits(o) for o in outputs] == alone[i], f"trial {trial}, request {i}"
            stats, use = engine.stats, engine.graph_use()
        preempted += stats.num_preemptions
        for before, after in pairwise(steps):
            if after.num_mixed_steps > before.num_mixed_steps:
                hit += after.prefix_hit_tokens > before.prefix_hit_tokens
        carried = sum(replays for (replays, _), g in zip(use, mixing.graphs(), strict=True) if g.phase == "mixed")
        assert carried >= stats.num_mixed_steps > 0
        assert stats.num_steps == stats.num_prefill_steps + stats.num_decode_steps == sum(r for r, _ in use)
        assert stats.num_bucket_misses == 0
    assert preempted > 0
    assert hit > 0


@pytest.mark.parametrize("trial", range(16))
def test_bits_do_not_depend_on_company(
    trial: int, llama: tuple[Path, Artifact], alone: list[list[tuple[Any, ...]]]
) -> None:
    rng = np.random.default_rng(100 + trial)
    tiny_pool = trial % 4 == 1
    prefix_cache = trial % 4 != 2
    tokens_per_step = int(rng.choice([3, 5, 16, 17, 40, 64]))
    num_blocks = 10 if tiny_pool else int(rng.choice([30, 64, 100]))
    max_num_seqs = 8 if tiny_pool else int(rng.choice([1, 2, 3, 5, 8]))
    requests = mixed_requests()
    order = [int(i) for i in rng.permutation(len(requests))]
    eager = trial % 5 == 4
    with Engine(
        llama[1],
        num_threads=1 + trial % 3,
        eager=eager,
        max_tokens_per_step=tokens_per_step,
        prefix_cache=int(prefix_cache),
        num_blocks=num_blocks,
        max_num_seqs=max_num_seqs,
        speculate_tokens=3 * (trial % 3),
        speculate_always=1,
    ) as engine:
        for _ in range(1 + trial % 2):  # the second round starts with a warm prefix cache
            found = drive(engine, [requests[i] for i in order])
            for i, outputs in zip(order, found, strict=True):
                assert [bits(o) for o in outputs] == alone[i], f"request {i} of trial {trial}"
        stats = engine.stats
        use = engine.graph_use()
    assert (stats.num_running, stats.num_waiting, stats.num_bucket_misses) == (0, 0, 0)
    assert stats.num_free_blocks == stats.num_blocks == num_blocks
    assert stats.num_finished == len(requests) * (1 + trial % 2)
    assert stats.prompt_tokens == sum(len(p) for p, _ in requests) * (1 + trial % 2)
    assert stats.output_tokens == sum(len(o[0]) for of in alone for o in of) * (1 + trial % 2)
    assert stats.num_steps == stats.num_prefill_steps + stats.num_decode_steps == sum(r for r, _ in use)
    assert stats.device["launched_steps" if eager else "replayed_steps"] == stats.num_steps
    assert stats.scheduled_tokens == sum(t for _, t in use)
    capacity = sum(r * g.max_tokens for (r, _), g in zip(use, llama[1].graphs(), strict=True))
    assert stats.padded_tokens == capacity - stats.scheduled_tokens > 0
    assert stats.step_ns >= stats.replay_ns + stats.sample_ns > 0
    if prefix_cache:
        assert tiny_pool or stats.cached_tokens > 0
        assert stats.num_cached_blocks > 0
    else:
        assert stats.cached_tokens == stats.num_cached_blocks == 0
    if tiny_pool:
        assert stats.num_preemptions > 0


def test_bits_of_requests_that_arrive_late(llama: tuple[Path, Artifact], alone: list[list[tuple[Any, ...]]]) -> None:
    """Requests join while others decode, and evict those of lower priorities; some are cancelled, some promoted."""
    requests = mixed_requests()
    evicted = promoted = 0
    for trial in range(4):
        rng = np.random.default_rng(trial)
        blocks, seqs, patience = int(rng.choice([14, 40])), int(rng.choice([3, 8])), int(rng.choice([5, 512]))
        with Engine(
            llama[1], num_threads=2, num_blocks=blocks, max_num_seqs=seqs, priority_patience=patience
        ) as engine:
            found: dict[int, list[Output]] = {}
            which: dict[int, int] = {}
            doomed: list[int] = []
            left = [int(i) for i in rng.permutation(len(requests))]
            while True:
                if left and rng.random() < 0.4:
                    prompt, params = requests[left[-1]]
                    submitted = engine.submit(prompt, params, priority=int(rng.integers(-1, 2)))
                    which[submitted] = left.pop()
                    found[submitted] = [Output() for _ in range(params.n)]
                    doomed.append(engine.submit(prompt[:40], params, max_tokens=60))
                if doomed and rng.random() < 0.2:
                    engine.cancel(doomed.pop(0))
                progressed = engine.step()
                engine.check_integrity()
                events = engine.poll()
                for event in events:
                    if event.request_id not in found:
                        doomed = [d for d in doomed if d != event.request_id or event.kind == "token"]
                        continue
                    output = found[event.request_id][event.output_index]
                    if event.kind == "token":
                        output.ids.append(event.token_id)
                        output.logprobs.append(event.logprob)
                        output.top.append(event.top_logprobs)
                    else:
                        output.reason = event.finish_reason
                if not left and not progressed and not events:
                    break
            for submitted, outputs in found.items():
                assert [bits(o) for o in outputs] == alone[which[submitted]], f"trial {trial}"
            assert len(found) == len(requests)
            stats = engine.stats
            assert stats.num_free_blocks == stats.num_blocks
            assert sum(engine.evictions().values()) == stats.num_evictions
            evicted, promoted = evicted + stats.num_evictions, promoted + stats.num_promotions
    assert evicted > 0
    assert promoted > 0


@pytest.mark.parametrize("eager", [False, True])
def test_eager_launches_each_command(eager: bool, llama: tuple[Path, Artifact]) -> None:
    """A job of the thread team is a whole graph, or one command of it."""
    with Engine(llama[1], num_threads=2, num_blocks=64, eager=eager) as engine:
        before = engine.stats.device
        drive(engine, [mixed_requests()[0]])
        after, use = engine.stats.device, engine.graph_use()
    commands = sum(replays * g.num_commands for (replays, _), g in zip(use, llama[1].graphs(), strict=True))
    steps = sum(replays for replays, _ in use)
    assert after["team_jobs"] - before["team_jobs"] == (commands if eager else steps)
    assert after["launched_graphs" if eager else "recorded_graphs"] == len(use)
    assert after["recorded_graphs" if eager else "launched_graphs"] == 0
    assert (after["replayed_steps"], after["launched_steps"]) == ((0, steps) if eager else (steps, 0))
