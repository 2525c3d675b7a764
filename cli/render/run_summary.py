"""Progress and summary of `llmc run`."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from llmc.runtime.offline.decode_shares import decode_shares, stat

if TYPE_CHECKING:
    from llmc.runtime.llm import LLM, Progress
    from llmc.runtime.outputs import RequestOutput


@contextmanager
def progress_bar(quiet: bool) -> Iterator[Progress | None]:
    """A progress bar on stderr with requests and tokens per second; None if quiet or if stderr is no terminal."""
    from llmc.cli.render.console import Console

    console = Console(stderr=True)
    if quiet or not console.is_terminal:
        yield None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rate]:.0f} tokens/s"), TimeRemainingColumn()
    )  # fmt: skip
    with Progress(*columns, console=console, transient=True) as bars:
        task = bars.add_task("run", total=None, rate=0.0)
        start = shown = time.monotonic()

        def update(finished: int, total: int, tokens: int) -> None:
            nonlocal shown
            now = time.monotonic()
            # Drawn ten times a second at most: a decode step may take less than a millisecond.
            if now - shown < 0.1 and finished < total:
                return
            shown = now
            bars.update(task, completed=finished, total=total, rate=tokens / max(now - start, 1e-9))

        yield update


class Summary:
    """Counters of one run; times in seconds, rates per second."""

    def __init__(self, num_resumed: int = 0) -> None:
        self._start = time.monotonic()
        self._num_resumed = num_resumed
        self._prompt_tokens = self._output_tokens = self._cached_tokens = 0
        self._ttft: list[float] = []
        self._tpot: list[float] = []
        self._num_requests = self._num_failed = 0

    def add(self, output: RequestOutput) -> None:
        """Counts a finished request."""
        self._num_requests += 1
        self._num_failed += output.error is not None
        self._prompt_tokens += output.usage.prompt_tokens
        self._output_tokens += output.usage.completion_tokens
        self._cached_tokens += output.usage.cached_tokens
        if output.timings.ttft_s is not None:
            self._ttft.append(output.timings.ttft_s)
        if output.timings.tpot_s is not None:
            self._tpot.append(output.timings.tpot_s)

    def as_dict(self, llm: LLM) -> dict[str, Any]:
        """The summary with the engine's counters; call it while the engine is open."""
        seconds = max(time.monotonic() - self._start, 1e-9)
        stats = llm.stats()
        scheduled, padded = stat(stats, "scheduled_tokens"), stat(stats, "padded_tokens")
        return {
            "requests": self._num_requests,
            "failed": self._num_failed,
            "resumed": self._num_resumed,
            "seconds": seconds,
            "prompt_tokens": self._prompt_tokens,
            "cached_tokens": self._cached_tokens,
            "output_tokens": self._output_tokens,
            "output_tokens_per_s": self._output_tokens / seconds,
            "total_tokens_per_s": (self._prompt_tokens + self._output_tokens) / seconds,
            "ttft_s": _spread(self._ttft),
            "tpot_s": _spread(self._tpot),
            "padding_waste": padded / (scheduled + padded) if scheduled + padded else 0.0,
            "bucket_misses": stat(stats, "num_bucket_misses"),
            "preemptions": stat(stats, "num_preemptions"),
            "speculation": speculation(stats),
            "time_s": {name: stat(stats, f"{name}_ns") / 1e9 for name in _TIMES},
            "decode": decode_shares(stats),
            "graph_use": llm.graph_use(),
        }


# Times of the engine's steps, in order; kernel and barrier are parts of replay.
_TIMES = ("step", "schedule", "prepare", "replay", "sample", "kernel", "barrier")


def speculation(stats: Any) -> dict[str, float] | None:
    """Guesses of next tokens that were checked and that were right, and tokens gained per speculative step.

    None if there was no speculative step.
    """
    steps = stat(stats, "num_speculative_steps")
    if steps == 0:
        return None
    drafted, accepted = stat(stats, "drafted_tokens"), stat(stats, "accepted_tokens")
    return {"steps": steps, "drafted": drafted, "accepted": accepted, "gained_per_step": accepted / steps}


def _spread(values: list[float]) -> dict[str, float] | None:
    """Mean, median and 99th percentile (nearest rank); None without values."""
    if not values:
        return None
    ranked = sorted(values)
    rank = {
        name: ranked[min(len(ranked) - 1, int(share * len(ranked)))] for name, share in (("p50", 0.5), ("p99", 0.99))
    }
    return {"mean": sum(ranked) / len(ranked), **rank}


def print_summary(summary: dict[str, Any]) -> None:
    """The summary as a table on stderr."""
    from rich.table import Table

    from llmc.cli.render.console import Console
    from llmc.cli.render.tables import print_table

    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column()
    table.add_column()
    failed = f", {summary['failed']} failed" if summary["failed"] else ""
    resumed = f", {summary['resumed']} kept from before" if summary["resumed"] else ""
    table.add_row("requests", f"{summary['requests']} in {summary['seconds']:.2f} s{failed}{resumed}")
    table.add_row(
        "tokens",
        f"{summary['prompt_tokens']} in ({summary['cached_tokens']} cached), {summary['output_tokens']} out",
    )
    table.add_row(
        "throughput",
        f"{summary['output_tokens_per_s']:.1f} tokens/s out, {summary['total_tokens_per_s']:.1f} in all",
    )
    for name in ("ttft", "tpot"):
        spread = summary[f"{name}_s"]
        if spread is not None:
            table.add_row(name.upper(), ", ".join(f"{key} {value * 1e3:.2f} ms" for key, value in spread.items()))
    table.add_row("padding waste", f"{summary['padding_waste']:.1%} of the rows replayed")
    if summary["decode"] is not None:
        shares = summary["decode"]
        parts = (f"{shares['kernels']:.1%} in kernels", f"{shares['barrier']:.1%} at barriers")
        table.add_row("decode steps", f"{', '.join(parts)}, {shares['overhead']:.2%} overhead")
    if summary["speculation"] is not None:
        found = summary["speculation"]
        right = f"{found['accepted']} of {found['drafted']} guesses right"
        table.add_row(
            "speculation", f"{right}, {found['gained_per_step']:.2f} more tokens in each of {found['steps']} steps"
        )
    table.add_row("bucket misses", f"{summary['bucket_misses']}, preemptions {summary['preemptions']}")
    for use in sorted(summary["graph_use"], key=lambda use: -use["replays"])[:8]:
        table.add_row(f"graph {use['graph']}", f"{use['replays']} replays, {use['tokens']} tokens")
    print_table(table, Console(stderr=True))
