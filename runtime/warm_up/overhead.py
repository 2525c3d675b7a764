"""Time of a step around its replay: scheduling, preparing, sampling, publishing, and the host taking the events."""

from __future__ import annotations

import time

from llmc.runtime.binding.engine import Engine
from llmc.runtime.binding.sampling import SamplingParams

_TOKENS = 24
_ROUNDS = 5


def measure_overhead(engine: Engine, max_num_seqs: int) -> tuple[float, float]:
    """(seconds per step, seconds per sampled token), medians. Runs greedy requests with a prompt of one token.

    The engine must be idle, with a free KV block for each of max_num_seqs sequences. Raises LlmcError.
    """
    one = _around_a_step(engine, 1)
    if max_num_seqs == 1:
        return one, 0.0
    token_s = max(0.0, (_around_a_step(engine, max_num_seqs) - one) / (max_num_seqs - 1))
    return max(0.0, one - token_s), token_s


def _around_a_step(engine: Engine, num_seqs: int) -> float:
    """Time of a decode step with num_seqs sequences and its events, without the replay. Median over rounds of the
    mean."""
    params = SamplingParams(max_tokens=_TOKENS, temperature=0.0, ignore_eos=True)
    means = []
    for _ in range(_ROUNDS):
        for index in range(num_seqs):
            engine.submit([index % 2], params)
        # The prompts' steps are left out: when each sequence has a token, all of them decode together.
        while engine.step() and engine.stats.num_running < num_seqs:
            pass
        engine.poll()
        before, start = engine.stats, time.monotonic()
        while engine.step():
            engine.poll()
        seconds, after = time.monotonic() - start, engine.stats
        steps = max(1, after.num_steps - before.num_steps)
        means.append((seconds - (after.replay_ns - before.replay_ns) / 1e9) / steps)
    return sorted(means)[_ROUNDS // 2]
