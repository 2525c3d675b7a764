"""Warm-up: every graph is replayed once before the first request, so that no request pays for cold pages."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from llmc.runtime.binding import GraphInfo

from .async_engine import AsyncEngine


@dataclass(frozen=True)
class WarmStep:
    """One graph that was replayed: the `done`-th of `total`, and its wall time."""

    done: int
    total: int
    graph: GraphInfo
    wall_ns: int

    def line(self) -> str:
        """A line of the log."""
        unit = {"prefill": "length", "decode": "context", "mixed": "tokens"}[self.graph.phase]
        width = len(str(self.total))
        where = f"{self.graph.phase} {self.done:>{width}}/{self.total}"
        what = f"batch {self.graph.batch} {unit} {self.graph.seq}"
        return f"[warm-up] {where} {what} {self.wall_ns / 1e6:.2f} ms"


OnWarmStep = Callable[[WarmStep], None]


class WarmUp:
    """Coverage of the warm-up, readable from any thread while `run` works."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self.total = len(engine.graphs)
        self.warm = {phase: 0 for phase in dict.fromkeys(graph.phase for graph in engine.graphs)}
        self.seconds = 0.0
        self.stopped = False

    @property
    def num_warm(self) -> int:
        return sum(self.warm.values())

    def run(self, on_step: OnWarmStep | None = None) -> None:
        """Replays the graphs, the dearest first: it reads all weights, and what does not fit shows at once.

        Blocks; ends early once `stopped` is set. Raises LlmcError.
        """
        start = time.monotonic()
        graphs = self._engine.graphs
        dearest_first = sorted(range(self.total), key=lambda i: (-graphs[i].max_tokens, -graphs[i].seq, i))
        for index in dearest_first:
            if self.stopped:
                return
            wall_ns = self._engine.engine.warm_graph(index)
            self.warm[graphs[index].phase] += 1
            self.seconds = time.monotonic() - start
            if on_step is not None:
                on_step(WarmStep(self.num_warm, self.total, graphs[index], wall_ns))

    def seconds_left(self) -> int:
        """Whole seconds that the rest will take at the pace so far, at least 1; the first graphs are the dearest."""
        left = self.total - self.num_warm
        return max(1, math.ceil(self.seconds / max(1, self.num_warm) * left))

    def coverage(self) -> dict[str, object]:
        """Counts for /ready: {"total", "warm", "by_phase": {"decode": {"total", "warm"}}, "seconds"}."""
        totals = {phase: sum(graph.phase == phase for graph in self._engine.graphs) for phase in self.warm}
        by_phase = {phase: {"total": totals[phase], "warm": warm} for phase, warm in self.warm.items()}
        return {"total": self.total, "warm": self.num_warm, "by_phase": by_phase, "seconds": round(self.seconds, 3)}
