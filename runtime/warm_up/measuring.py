"""Measures replays of a graph: repeats, their spread, and how much they were disturbed."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Protocol

from llmc.runtime.binding import GraphInfo
from llmc.runtime.warm_up.disturbance import BUSY, Watch

_MAX_REPEATS = 9
# A replay that waited longer for a CPU in all measured something else.
_CLEAN = BUSY / 2
# _ENOUGH undisturbed repeats replace the others. To get them, a load may have _PATIENCE times the usual replays.
_ENOUGH, _PATIENCE = 3, 3


class GraphReplayer(Protocol):
    """The part of the engine that a warm-up needs."""

    def warm_load(self, graph: int, num_seqs: int, tokens_each: int, context: int) -> int: ...
    def walk_graph(self, graph: int) -> int: ...
    def enable_graph(self, graph: int, on: bool) -> None: ...


@dataclass(frozen=True, slots=True)
class Load:
    """Load of a replay: sequences with tokens_each new tokens each. `context`: tokens of each sequence after the
    replay."""

    num_seqs: int
    tokens_each: int
    context: int

    @property
    def tokens(self) -> int:
        """New tokens of all sequences."""
        return self.num_seqs * self.tokens_each


@dataclass(frozen=True, slots=True)
class MeasuredLoad:
    """Wall time of a load in graph `graph`: `typical` of `repeats` replays. deviation_s: their standard deviation, 0
    for a single one. disturbed: share of the time that other work took or the replay waited, 0 … 1."""

    graph: int
    load: Load
    seconds: float
    repeats: int
    deviation_s: float = 0.0
    disturbed: float = 0.0


def full_load(graph: GraphInfo, block_size: int, max_model_len: int) -> Load:
    """The load that fills a graph: its whole batch, at full length (prefill) or full context (decode). If the graph
    bounds the total context, each sequence gets an equal share."""
    reach = min(graph.max_blocks_per_seq * block_size, max_model_len)
    if graph.phase == "decode":
        each = graph.max_blocks // graph.max_seqs * block_size or graph.seq
        return Load(graph.max_seqs, 1, min(max(each, 1), reach))
    each = min(graph.seq, graph.max_tokens, reach)
    return Load(max(1, min(graph.max_seqs, graph.max_tokens // each)), each, each)


def light_load(graph: GraphInfo) -> Load:
    """The smallest load of a step with the whole batch: every kernel runs, and the weights are read once."""
    return Load(min(graph.max_seqs, graph.max_tokens), 1, 1)


def half_load(graph: GraphInfo, block_size: int, max_model_len: int) -> Load:
    """Half-length load: as many sequences as fill the graph, each half as long. A curve through light and full loads
    misses it. For decode: the full load."""
    full = full_load(graph, block_size, max_model_len)
    each = max(1, full.tokens_each // 2)
    return full if graph.phase == "decode" else Load(full.num_seqs, each, each)


def capped(times: Sequence[float]) -> list[float]:
    """The times, each at most three times their median: a larger one measured something else."""
    most = 3 * statistics.median(times)
    return [min(time, most) for time in times]


def typical(times: Sequence[float]) -> float:
    """Time to count for each of many replays with these times: the mean of `capped`. On a shared machine times have two
    humps, and the median lies on one of them."""
    return statistics.fmean(capped(times))


class Measurer:
    """Measures loads of an engine's graphs. measure_s: approximate time for one load. at_least: minimum number of
    repeats."""

    def __init__(
        self,
        replay: Callable[[int, Load], int],
        watch: Watch,
        *,
        measure_s: float,
        at_least: int = 1,
    ) -> None:
        self._replay, self._watch = replay, watch
        self._measure_s, self._at_least = measure_s, at_least

    def measure(self, graph: int, load: Load) -> Generator[None, None, MeasuredLoad]:
        """Replays the load and returns the measurement. Yields before each replay so that other work gets its turn.

        Repeats that waited for a CPU do not count if enough others did not; for those it waits, within bounds.
        """
        begin = self._watch.mark()
        seconds: list[float] = []
        waited: list[float] = []
        while self._goes_on(seconds, waited):
            yield
            mark = self._watch.mark()
            seconds.append(self._replay(graph, load) / 1e9)
            waited.append(min(seconds[-1], self._watch.waited_s(mark)))
        clean = [i for i, wait in enumerate(waited) if wait < _CLEAN * seconds[i]]
        kept = clean if len(clean) >= min(_ENOUGH, len(seconds)) else range(len(seconds))
        times = capped([seconds[i] for i in kept])
        share = sum(waited[i] for i in kept) / sum(seconds[i] for i in kept)
        return MeasuredLoad(
            graph,
            load,
            statistics.fmean(times),
            len(times),
            statistics.stdev(times) if len(times) > 1 else 0.0,
            round(max(share, self._watch.taken(begin)), 4),
        )

    def _goes_on(self, seconds: Sequence[float], waited: Sequence[float]) -> bool:
        """Whether to replay once more. Judged by the fastest time so far: with a coarse clock a load is replayed more
        often."""
        if len(seconds) < self._at_least:
            return True
        wanted = min(_MAX_REPEATS, math.floor(self._measure_s / min(seconds)))
        if len(seconds) < wanted:
            return True
        clean = sum(wait < _CLEAN * time for wait, time in zip(waited, seconds, strict=True))
        patient = len(seconds) < _PATIENCE * wanted and sum(seconds) < _PATIENCE * self._measure_s
        return clean < min(_ENOUGH, wanted) and patient
