"""Warm-up: graphs are replayed before requests need them, so that none pays for cold pages, and their costs measured.

A `WarmPlan` says in which order, which graphs a server must have to take requests, and which costs are known already.
`WarmUp` carries it out, one replay a call, so that a server can do the rest between the steps of its engine.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from llmc.runtime.binding import GraphInfo
from llmc.runtime.device import available_memory

# Reading the weights takes about as long as computing so many tokens: the weights of the remaining time.
_FIXED_TOKENS = 64
_MAX_REPEATS = 9
# Kernels are the same for any larger count of rows.
_MANY_TOKENS = 16


class GraphReplayer(Protocol):
    """What of the engine a warm-up needs."""

    def warm_load(self, graph: int, num_seqs: int, tokens_each: int, context: int) -> int: ...
    def walk_graph(self, graph: int) -> int: ...
    def enable_graph(self, graph: int, on: bool) -> None: ...


@dataclass(frozen=True, slots=True)
class Load:
    """What a replay carries: sequences of tokens_each new tokens and `context` tokens each, when it is done."""

    num_seqs: int
    tokens_each: int
    context: int


@dataclass(frozen=True, slots=True)
class MeasuredLoad:
    """Wall time of a replay of a load in graph `graph`, as `typical` has it of `repeats` of them."""

    graph: int
    load: Load
    seconds: float
    repeats: int


@dataclass(frozen=True)
class WarmPlan:
    """Graphs by index. order: those that are replayed, first to last. num_hot: so many of them make a server ready, the
    rest follows behind its traffic. measure: those whose cost is measured. dropped: never used, not part of order.
    measure_s: about the time that measuring a load may take.
    """

    order: tuple[int, ...]
    num_hot: int
    measure: frozenset[int] = frozenset()
    dropped: frozenset[int] = frozenset()
    measure_s: float = 0.1

    def __post_init__(self) -> None:
        if len(set(self.order)) != len(self.order) or self.dropped & set(self.order):
            raise ValueError("a warm-up replays each graph once and none that is dropped")
        if not 1 <= self.num_hot <= len(self.order):
            raise ValueError(f"num_hot is {self.num_hot} of {len(self.order)} graphs: use 1 or more of them")

    @classmethod
    def of_all(cls, graphs: Sequence[GraphInfo]) -> WarmPlan:
        """All graphs, the dearest first: it reads all weights, and what does not fit shows at once."""
        order = sorted(range(len(graphs)), key=lambda i: (-graphs[i].max_tokens, -graphs[i].seq, i))
        return cls(tuple(order), len(order))


@dataclass(frozen=True)
class WarmStep:
    """One graph that is warm: the `done`-th of `total`, its last wall time, what was measured, the estimated time left
    in seconds, and the memory left in bytes."""

    done: int
    total: int
    graph: GraphInfo
    wall_ns: int
    measured: tuple[MeasuredLoad, ...] = ()
    remaining_s: float = 0.0
    memory_left: int = field(default=0, compare=False)

    def line(self) -> str:
        """A line of the log."""
        unit = {"prefill": "length", "decode": "context", "mixed": "tokens"}[self.graph.phase]
        width = len(str(self.total))
        where = f"{self.graph.phase} {self.done:>{width}}/{self.total}"
        what = f"batch {self.graph.batch} {unit} {self.graph.seq}"
        left = f", {self.remaining_s:.0f} s left" if self.remaining_s >= 0.5 else ""
        return f"[warm-up] {where} {what} {self.wall_ns / 1e6:.2f} ms, {self.memory_left / 2**30:.2f} GiB free{left}"


OnWarmStep = Callable[[WarmStep], None]


def full_load(graph: GraphInfo, block_size: int, max_model_len: int) -> Load:
    """The load that fills a graph: its batch with its length each, or its context in decode."""
    reach = min(graph.max_blocks_per_seq * block_size, max_model_len)
    if graph.phase == "decode":
        return Load(graph.max_seqs, 1, min(max(graph.seq, 1), reach))
    each = min(graph.seq, graph.max_tokens, reach)
    return Load(max(1, min(graph.max_seqs, graph.max_tokens // each)), each, each)


def light_load(graph: GraphInfo) -> Load:
    """The least a step of the whole batch carries: every kernel runs, and the weights are read once."""
    return Load(min(graph.max_seqs, graph.max_tokens), 1, 1)


def half_load(graph: GraphInfo, block_size: int, max_model_len: int) -> Load:
    """As many sequences as fill a graph, of half the length, which a curve through light and full loads misses; of
    decode the full load."""
    full = full_load(graph, block_size, max_model_len)
    each = max(1, full.tokens_each // 2)
    return full if graph.phase == "decode" else Load(full.num_seqs, each, each)


def typical(times: Sequence[float]) -> float:
    """What to count for each of many replays that take such times: their mean, for on a shared machine times have two
    humps, and a median is one of them. None counts as more than three times the median: once it was something else."""
    most = 3 * statistics.median(times)
    return statistics.fmean(min(time, most) for time in times)


def _kernels(graph: GraphInfo) -> tuple[str, int, int, int]:
    """Equal for graphs of the same kernels: these depend on the phase, and on few rows, not on how many beyond that."""
    return graph.phase, graph.max_seqs, min(graph.max_tokens, _MANY_TOKENS), graph.num_commands


class WarmUp:
    """Carries out a plan. Its counts may be read from any thread while another one calls `advance` or `run`."""

    def __init__(
        self,
        engine: GraphReplayer,
        graphs: Sequence[GraphInfo],
        plan: WarmPlan | None = None,
        *,
        block_size: int,
        max_model_len: int,
    ) -> None:
        self._engine = engine
        self._graphs = graphs
        self._limits = block_size, max_model_len
        self.plan = plan or WarmPlan.of_all(graphs)
        self.total = len(self.plan.order)
        phases = [graphs[index].phase for index in self.plan.order]
        self._by_phase = {phase: phases.count(phase) for phase in dict.fromkeys(phases)}
        self.warm = dict.fromkeys(self._by_phase, 0)
        self.seconds = 0.0
        self.stopped = False
        self._replays = self._work()
        self._weights = {index: self._weight(index) for index in self.plan.order}
        self._left = sum(self._weights.values())
        self._worked = 0.0

    @property
    def num_warm(self) -> int:
        return sum(self.warm.values())

    @property
    def hot_done(self) -> bool:
        """Whether every graph that a server needs to take requests is warm."""
        return self.num_warm >= self.plan.num_hot

    @property
    def done(self) -> bool:
        return self.num_warm == self.total

    def restrict(self) -> None:
        """Has requests use no graph that is dropped or not warm yet; each joins as it becomes warm."""
        hot = set(self.plan.order[: self.plan.num_hot])
        for index in range(len(self._graphs)):
            if index not in hot:
                self._engine.enable_graph(index, False)

    def advance(self) -> WarmStep | None:
        """One replay; the step when it was a graph's last one. Raises LlmcError."""
        start = time.monotonic()
        step = next(self._replays, None)
        self.seconds += time.monotonic() - start
        return step

    def run(self, on_step: OnWarmStep | None = None, *, hot_only: bool = False) -> None:
        """Replays until all graphs, or the hot ones, are warm, or `stopped` is set. Blocks. Raises LlmcError."""
        while not (self.stopped or self.done or (hot_only and self.hot_done)):
            step = self.advance()
            if step is not None and on_step is not None:
                on_step(step)

    def seconds_left(self) -> int:
        """Whole seconds until the hot graphs are warm, at the pace so far; at least 1."""
        left = sum(self._weights[index] for index in self.plan.order[self.num_warm : self.plan.num_hot])
        return max(1, math.ceil(self.seconds * left / max(self._worked, _FIXED_TOKENS)))

    def coverage(self) -> dict[str, object]:
        """Counts for /ready, with "by_phase": {"decode": {"total", "warm"}, …}; seconds: of work so far."""
        by_phase = {phase: {"total": self._by_phase[phase], "warm": warm} for phase, warm in self.warm.items()}
        return {
            "total": self.total,
            "warm": self.num_warm,
            "hot": self.plan.num_hot,
            "dropped": len(self.plan.dropped),
            "by_phase": by_phase,
            "seconds": round(self.seconds, 3),
        }

    def _work(self) -> Iterator[WarmStep | None]:
        """Every replay of the plan, in order. A walk without rows makes a graph as warm as one of the same kernels that
        was replayed before."""
        replayed: set[tuple[str, int, int, int]] = set()
        for position, index in enumerate(self.plan.order):
            graph = self._graphs[index]
            light, half, full = (light_load(graph), *(of(graph, *self._limits) for of in (half_load, full_load)))
            measure, kernels = index in self.plan.measure, _kernels(graph)
            if measure or kernels not in replayed:
                wall_ns = self._replay(index, light)
            else:
                wall_ns = self._engine.walk_graph(index)
            replayed.add(kernels)
            measured = []
            for load in dict.fromkeys((light, half, full)) if measure else ():
                times: list[float] = []
                while len(times) < self._repeats(times):
                    yield None
                    wall_ns = self._replay(index, load)
                    times.append(wall_ns / 1e9)
                measured.append(MeasuredLoad(index, load, typical(times), len(times)))
            if position >= self.plan.num_hot:
                self._engine.enable_graph(index, True)
            self.warm[graph.phase] += 1
            self._left -= self._weights[index]
            self._worked += self._weights[index]
            remaining = (self.seconds + wall_ns / 1e9) * self._left / self._worked
            yield WarmStep(self.num_warm, self.total, graph, wall_ns, tuple(measured), remaining, available_memory())

    def _repeats(self, times: Sequence[float]) -> int:
        """How often a load is replayed, judged by the fastest time so far: more often where the clock is coarse."""
        if not times:
            return 1
        return max(1, min(_MAX_REPEATS, math.floor(self.plan.measure_s / min(times))))

    def _replay(self, index: int, load: Load) -> int:
        return self._engine.warm_load(index, load.num_seqs, load.tokens_each, load.context)

    def _weight(self, index: int) -> float:
        """Time of a graph's replays, in tokens: a guess, for a walk too high."""
        tokens = self._graphs[index].max_tokens
        return 3 * _FIXED_TOKENS + tokens if index in self.plan.measure else 1.0
