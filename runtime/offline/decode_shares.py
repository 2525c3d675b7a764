"""Where the time of decode steps goes, by an engine's counters."""

from __future__ import annotations

from typing import Any


def decode_shares(stats: Any) -> dict[str, float] | None:
    """What decode steps spend their wall time on; None without one.

    kernels: inside kernels on thread 0; barrier: thread 0 waiting for the other threads; overhead: all the rest, from
    scheduling to sampling.
    """
    step = stat(stats, "decode_step_ns")
    if step == 0:
        return None
    kernels, barrier = stat(stats, "decode_kernel_ns") / step, stat(stats, "decode_barrier_ns") / step
    return {"kernels": kernels, "barrier": barrier, "overhead": 1 - kernels - barrier}


def stat(stats: Any, name: str) -> int:
    """A counter of `Engine.stats`, or of what `LLM.stats` gives of it."""
    return int(stats[name] if isinstance(stats, dict) else getattr(stats, name))
