"""The log line that reports every few seconds what the engine does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from llmc.runtime.binding.statistics import EngineStats


class Throughput:
    """Reports the change of the engine's counters between two reads; times in seconds."""

    def __init__(self, stats: EngineStats, now_s: float) -> None:
        self._last, self._then_s = stats, now_s

    def line(self, stats: EngineStats, now_s: float) -> str | None:
        """The activity since the last read; None if nothing happened and nothing waits."""
        last, seconds = self._last, max(now_s - self._then_s, 1e-9)
        self._last, self._then_s = stats, now_s
        if stats.num_steps == last.num_steps and not stats.num_running and not stats.num_waiting:
            return None
        queried = stats.prefix_query_tokens - last.prefix_query_tokens
        rows = stats.scheduled_tokens - last.scheduled_tokens
        padding = stats.padded_tokens - last.padded_tokens
        used = stats.num_blocks - stats.num_free_blocks
        states = stats.num_states - stats.num_free_states - stats.num_kept_states
        parts = [
            f"prompt {(stats.prompt_tokens - last.prompt_tokens) / seconds:.1f} tokens/s",
            f"generation {(stats.output_tokens - last.output_tokens) / seconds:.1f} tokens/s",
            f"{stats.num_running} running, {stats.num_waiting} waiting",
            f"KV blocks {_share(used, stats.num_blocks)}",
            *([f"states {_share(states, stats.num_states)}"] if stats.num_states else []),
            f"padding {_share(padding, rows + padding)}",
        ]
        if queried:
            parts.append(f"prefix hits {_share(stats.prefix_hit_tokens - last.prefix_hit_tokens, queried)}")
        drafted = stats.drafted_tokens - last.drafted_tokens
        if drafted:
            parts.append(f"guesses right {_share(stats.accepted_tokens - last.accepted_tokens, drafted)}")
        return "; ".join(parts)


async def tell_throughput(
    stats: Callable[[], EngineStats], interval_s: float, say: Callable[[str], None], clock: Callable[[], float]
) -> None:
    """Reports a line every interval_s, until cancelled."""
    throughput = Throughput(stats(), clock())
    while True:
        await asyncio.sleep(interval_s)
        line = throughput.line(stats(), clock())
        if line is not None:
            say(line)


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.0f} %" if whole else "0 %"
