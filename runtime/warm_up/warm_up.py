"""Warm-up: replays graphs before requests need them, so that no request pays for cold pages, and measures their costs.

A `WarmPlan` lists the order, the graphs a server needs before it takes requests, and the graphs to measure. `WarmUp`
carries it out, one replay a call, so that a server can work between the steps of its engine.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field

from llmc.machine import available_memory
from llmc.runtime.binding import GraphInfo
from llmc.runtime.warm_up.disturbance import BUSY, MachineWatch, Watch
from llmc.runtime.warm_up.measuring import GraphReplayer, Load, MeasuredLoad, Measurer, full_load, half_load, light_load

REPLAY_S = 5.0
"""Approximate seconds of replaying graphs before the rest is walked through, unless a plan sets another time."""
# Reading the weights takes about as long as computing that many tokens; used to estimate the remaining time.
_FIXED_TOKENS = 64
# Beyond that many rows, kernels are the same.
_MANY_TOKENS = 16
# What is measured beside a start: so many repeats of a load; a full and a half load take so many times a full one.
_START_REPEATS, _MARGIN = 3, 1.5
# A probe has at most that many times the tokens of the one before.
_GROWTH = 4


@dataclass(frozen=True)
class WarmPlan:
    """Plan of a warm-up; graphs are given by index.

    order: graphs to replay, first to last. num_hot: leading graphs of `order` that must be warm before ready; the rest
    follows behind traffic. measure: graphs whose cost is measured. dropped: graphs that are never used, not in `order`.
    measure_s: approximate time to measure one load. measure_within_s: measure only when all is warm, the machine is
    idle and all of it takes at most that long; None: always measure. replay_s: approximate time of replays; after that,
    graphs whose kernels were replayed are only walked through. skipped: do nothing; the first use pays.
    """

    order: tuple[int, ...]
    num_hot: int
    measure: frozenset[int] = frozenset()
    dropped: frozenset[int] = frozenset()
    measure_s: float = 0.1
    measure_within_s: float | None = None
    replay_s: float = REPLAY_S
    skipped: bool = False

    def __post_init__(self) -> None:
        if len(set(self.order)) != len(self.order) or self.dropped & set(self.order):
            raise ValueError("a warm-up replays each graph once and none that is dropped")
        if not 1 <= self.num_hot <= len(self.order):
            raise ValueError(f"num_hot is {self.num_hot} of {len(self.order)} graphs: use 1 or more of them")

    @classmethod
    def of_all(cls, graphs: Sequence[GraphInfo]) -> WarmPlan:
        """A plan for all graphs, the most expensive first: it reads all weights, and running out of memory shows at
        once."""
        order = sorted(range(len(graphs)), key=lambda i: (-graphs[i].max_tokens, -graphs[i].seq, i))
        return cls(tuple(order), len(order))


@dataclass(frozen=True)
class WarmStep:
    """One graph that became warm: number `done` of `total`. Carries its last wall time, its measurements, the estimated
    seconds left, and the bytes of memory left. replayed: False if it was only walked through. note: what a reader
    should know."""

    done: int
    total: int
    graph: GraphInfo
    wall_ns: int
    measured: tuple[MeasuredLoad, ...] = ()
    remaining_s: float = 0.0
    memory_left: int = field(default=0, compare=False)
    replayed: bool = True
    note: str = ""

    def line(self) -> str:
        """A line of the log."""
        unit = {"prefill": "length", "decode": "context", "mixed": "tokens"}[self.graph.phase]
        width = len(str(self.total))
        where = f"{self.graph.phase} {self.done:>{width}}/{self.total}"
        what = f"batch {self.graph.batch} {unit} {self.graph.bucket.length}"
        left = f", {self.remaining_s:.0f} s left" if self.remaining_s >= 0.5 else ""
        how = "replayed" if self.replayed else "walked"
        took, free = f"{how} in {self.wall_ns / 1e6:.2f} ms", f"{self.memory_left / 2**30:.2f} GiB free"
        return f"[warm-up] {where} {what} {took}, {free}{left}"


OnWarmStep = Callable[[WarmStep], None]


@dataclass(frozen=True, slots=True)
class WarmCounts:
    """Number of warm graphs: replayed with rows, or walked through without rows after a graph with the same kernels."""

    replayed: int = 0
    walked: int = 0

    @property
    def warm(self) -> int:
        return self.replayed + self.walked

    def and_one(self, *, replayed: bool) -> WarmCounts:
        """These counts plus one graph."""
        return WarmCounts(self.replayed + replayed, self.walked + (not replayed))


def _kernels(graph: GraphInfo) -> tuple[str, int, int, int]:
    """Key of a graph's kernels. They depend on the phase and on the row count while it is small, not beyond."""
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
        watch: Watch | None = None,
        before: Callable[[], object] | None = None,
    ) -> None:
        """watch: tells how busy the machine is; None: the machine's own counters. before: warms up what lies outside
        the graphs, such as a draft."""
        self._engine = engine
        self._graphs = graphs
        self._limits = block_size, max_model_len
        self._watch: Watch = watch or MachineWatch()
        self._began = self._watch.mark()
        self.plan = plan or WarmPlan.of_all(graphs)
        self.total = len(self.plan.order)
        phases = [graphs[index].phase for index in self.plan.order]
        self._by_phase = {phase: phases.count(phase) for phase in dict.fromkeys(phases)}
        self.warm = dict.fromkeys(self._by_phase, WarmCounts())
        self._counting = threading.Lock()
        self.seconds = 0.0
        self.stopped = False
        self._before = before
        self._replays = self._work()
        self._light_ns: dict[tuple[str, int, int, int], int] = {}
        self._replayed_ns = 0
        self._weights = {index: self._weight(index) for index in self.plan.order}
        self._left = sum(self._weights.values())
        self._worked = 0.0

    @property
    def counts(self) -> WarmCounts:
        """Counts over all phases."""
        with self._counting:
            phases = list(self.warm.values())
        return WarmCounts(sum(one.replayed for one in phases), sum(one.walked for one in phases))

    @property
    def num_warm(self) -> int:
        return self.counts.warm

    @property
    def hot_done(self) -> bool:
        """Whether every graph that a server needs to take requests is warm."""
        return self.plan.skipped or self.num_warm >= self.plan.num_hot

    @property
    def done(self) -> bool:
        return self.plan.skipped or self.num_warm == self.total

    def restrict(self) -> None:
        """Restricts requests to warm graphs that were not dropped; each graph joins as it becomes warm."""
        hot = set(self.plan.order if self.plan.skipped else self.plan.order[: self.plan.num_hot])
        for index in range(len(self._graphs)):
            if index not in hot:
                self._engine.enable_graph(index, False)

    def joined(self, graphs: Sequence[GraphInfo], replayed: bool = True) -> None:
        """Counts graphs that were added to the engine and are warm already, replayed or walked through. From any
        thread."""
        with self._counting:
            for graph in graphs:
                self._by_phase[graph.phase] = self._by_phase.get(graph.phase, 0) + 1
                self.warm[graph.phase] = self.warm.get(graph.phase, WarmCounts()).and_one(replayed=replayed)
            self.total += len(graphs)

    def advance(self) -> WarmStep | None:
        """Runs one replay. Returns the step if it was the last replay of a graph. Raises LlmcError."""
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
        """Counts for /ready, with "by_phase": {"decode": {"total", "warm", "replayed", "walked"}, …}. seconds: duration
        of the work so far. skipped: no warm-up at all."""
        with self._counting:
            phases, totals, total = dict(self.warm), dict(self._by_phase), self.total
        by_phase = {
            phase: {"total": totals[phase], "warm": one.warm, "replayed": one.replayed, "walked": one.walked}
            for phase, one in phases.items()
        }
        counts = WarmCounts(sum(one.replayed for one in phases.values()), sum(one.walked for one in phases.values()))
        return {
            "total": total,
            "warm": counts.warm,
            "replayed": counts.replayed,
            "walked": counts.walked,
            "hot": self.plan.num_hot,
            "dropped": len(self.plan.dropped),
            "skipped": self.plan.skipped,
            "by_phase": by_phase,
            "seconds": round(self.seconds, 3),
        }

    def _work(self) -> Iterator[WarmStep | None]:
        """Every replay of the plan, in order. Walking through a graph without rows warms it as well as the replayed
        graph with the same kernels."""
        plan, note = self.plan, ""
        if self._before is not None and not plan.skipped:
            self._before()
            yield None
        for position, index in enumerate(() if plan.skipped else plan.order):
            graph = self._graphs[index]
            measure = index in plan.measure and plan.measure_within_s is None
            replayed = measure or self._affords(graph)
            wall_ns = self._replay_light(index) if replayed else self._engine.walk_graph(index)
            measured: list[MeasuredLoad] = []
            if measure:
                measurer = Measurer(self._replay, self._watch, measure_s=plan.measure_s)
                measured = yield from self._measure(measurer, index)
                wall_ns = round(measured[-1].seconds * 1e9)
            if plan.measure and plan.measure_within_s is not None and position == len(plan.order) - 1:
                measured, note = yield from self._measure_beside(plan.measure_within_s)
            if position >= plan.num_hot:
                self._engine.enable_graph(index, True)
            with self._counting:
                self.warm[graph.phase] = self.warm[graph.phase].and_one(replayed=replayed)
            self._left -= self._weights[index]
            self._worked += self._weights[index]
            remaining = (self.seconds + wall_ns / 1e9) * self._left / self._worked
            yield WarmStep(
                self.num_warm,
                self.total,
                graph,
                wall_ns,
                tuple(measured),
                remaining,
                available_memory(),
                replayed,
                note,
            )

    def _affords(self, graph: GraphInfo) -> bool:
        """Whether to replay the graph: its kernels were not replayed yet, or the replay time left covers one more like
        the last."""
        known = self._light_ns.get(_kernels(graph))
        return known is None or self._replayed_ns + known <= self.plan.replay_s * 1e9

    def _measure(self, measurer: Measurer, index: int) -> Generator[None, None, list[MeasuredLoad]]:
        found = []
        for load in dict.fromkeys((light_load(self._graphs[index]), self._half(index), self._full(index))):
            found.append((yield from measurer.measure(index, load)))
        return found

    def _measure_beside(self, within_s: float) -> Generator[None, None, tuple[list[MeasuredLoad], str]]:
        """Unrequested measurements, and why some are missing. Measures nothing on a busy machine, or if all would take
        too long."""
        hint = "costs are not measured: {}; llmc warmup measures them"
        if self._watch.taken(self._began) >= BUSY:
            return [], hint.format("other programs keep this machine busy")
        seconds = yield from self._estimate(within_s)
        if seconds > within_s:
            return [], hint.format(f"it would take more than {within_s:g} s")
        found: list[MeasuredLoad] = []
        begin = time.monotonic()
        measurer = Measurer(self._replay, self._watch, measure_s=0.0, at_least=_START_REPEATS)
        for index in self.plan.order:
            if index not in self.plan.measure:
                continue
            measured = yield from self._measure(measurer, index)
            if any(one.disturbed >= BUSY for one in measured):
                return found, hint.format("other programs keep this machine busy")
            found += measured
            if time.monotonic() - begin > _MARGIN * within_s:
                return found, hint.format("it takes longer than expected")
        # A single load may be shorter than the resolution of the machine's counters.
        if self._watch.taken(self._began) >= BUSY:
            return [], hint.format("other programs keep this machine busy")
        return found, ""

    def _estimate(self, enough_s: float) -> Generator[None, None, float]:
        """Approximate upper bound of the seconds that measuring takes. Returns early with more than enough_s once that
        is certain.

        Prompts of growing length measure the time per row; each has at most _GROWTH times the tokens of the one before.
        """
        measure = [index for index in self.plan.order if index in self.plan.measure]
        # A large model is recognized at once: its light loads alone take too long.
        least_s = _START_REPEATS * sum(2 * self._light_of(i) for i in measure) / 1e9
        if least_s > enough_s:
            return least_s
        row_ns = 0.0
        prompts = [index for index in measure if self._graphs[index].phase != "decode"]
        if prompts:
            index = max(prompts, key=lambda i: self._full(i).tokens)
            full, ns = self._full(index), self._light_of(index)
            tokens, each = full.num_seqs, 1
            while each < full.tokens_each:
                each = min(_GROWTH * each, full.tokens_each)
                most_s = _START_REPEATS * ns / tokens * full.num_seqs * each / 1e9
                if most_s > enough_s:
                    return most_s
                yield
                ns, tokens = self._replay(index, Load(full.num_seqs, each, each)), full.num_seqs * each
            row_ns = ns / tokens
        each_ns = (
            3 * self._light_of(i)
            if self._graphs[i].phase == "decode"
            else self._light_of(i) + _MARGIN * max(self._light_of(i), row_ns * self._full(i).tokens)
            for i in measure
        )
        return _START_REPEATS * sum(each_ns) / 1e9

    def _replay_light(self, index: int) -> int:
        """Replays with the smallest load, and records the time for graphs with the same kernels."""
        wall_ns = self._replay(index, light_load(self._graphs[index]))
        kernels = _kernels(self._graphs[index])
        self._light_ns[kernels] = min(wall_ns, self._light_ns.get(kernels, wall_ns))
        self._replayed_ns += wall_ns
        return wall_ns

    def _replay(self, index: int, load: Load) -> int:
        return self._engine.warm_load(index, load.num_seqs, load.tokens_each, load.context)

    def _light_of(self, index: int) -> int:
        return self._light_ns[_kernels(self._graphs[index])]

    def _full(self, index: int) -> Load:
        return full_load(self._graphs[index], *self._limits)

    def _half(self, index: int) -> Load:
        return half_load(self._graphs[index], *self._limits)

    def _weight(self, index: int) -> float:
        """Estimated time of a graph's replays, in tokens; too high for a walk."""
        tokens = self._graphs[index].max_tokens
        return 3 * _FIXED_TOKENS + tokens if index in self.plan.measure and self.plan.measure_within_s is None else 1.0
