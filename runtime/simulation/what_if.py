"""What-if: runs a trace through the real scheduler in virtual time, with a ladder that need not be compiled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from llmc.buckets.bucket import MAX_DIM, Bucket, BucketError, area, whole_blocks
from llmc.buckets.planner import Resources
from llmc.buckets.step_cost import ROW_UNIT, CostCurve, StepCosts
from llmc.buckets.trace import Trace
from llmc.runtime.binding.statistics import BucketMiss
from llmc.runtime.simulation.engine import (
    Curve,
    Pipeline,
    SimulatedEngine,
    SimulatedGraph,
    SimulatedLoad,
    SimulatedTrace,
)

Floats = npt.NDArray[np.float64]
OnProgress = Callable[[str, int, int], None]
_WAITING = 1 << 30


@dataclass(frozen=True)
class Ladder:
    """Buckets to try. source: the spec, or their origin. For an artifact also its path, the row unit of each graph and
    the bytes of the arena."""

    name: str
    buckets: tuple[Bucket, ...]
    source: str = ""
    path: Path | None = None
    row_units: tuple[int, ...] = ()
    arena_bytes: int | None = None

    def tile(self, index: int) -> int:
        """Row unit of a bucket's graph."""
        return self.row_units[index] if self.row_units else ROW_UNIT


@dataclass(frozen=True)
class Server:
    """The server on which all ladders are tried; lengths in tokens. num_blocks 0: enough for max_num_seqs of the
    longest sequences, but at most 1 GiB. state_bytes: of a sequence's states, whose slots are beside the blocks.
    max_prefill_tokens 0: the largest prefill bucket. guesses: most per sequence and decode step, each right with these
    odds if those before it are. draft_s: seconds in which a draft guesses one token of each sequence; 0: guesses take
    no time."""

    max_model_len: int
    max_num_seqs: int
    block_size: int = 32
    num_blocks: int = 0
    kv_block_bytes: int = 1
    state_bytes: int = 0
    prefix_cache: bool = True
    max_prefill_tokens: int = 0
    strict: bool = False
    guesses: int = 0
    odds: float = 0.0
    draft_s: float = 0.0

    def check(self, ladder: Ladder) -> None:
        """Raises BucketError if the ladder or the KV pool cannot serve every request that this server accepts."""
        held = self.num_blocks * self.block_size
        if self.num_blocks and held < self.max_model_len:
            raise BucketError(
                f"{self.num_blocks} KV blocks hold {held} tokens, max-model-len is {self.max_model_len}: give at least "
                f"--num-blocks {-(-self.max_model_len // self.block_size)} or lower --max-model-len to {held}"
            )
        decode = [b for b in ladder.buckets if b.phase == "decode"]
        prefill = [b for b in ladder.buckets if b.phase != "decode"]
        if not decode or not prefill:
            raise BucketError(f"{ladder.name} has no {'prefill' if decode else 'decode'} bucket: add one")
        longest = max(b.seq for b in decode)
        if longest < self.max_model_len:
            raise BucketError(
                f"{ladder.name} holds contexts of {longest} tokens, max-model-len is {self.max_model_len}: add "
                f"a decode bucket of {self.max_model_len} or lower --max-model-len to {longest}"
            )


@dataclass(frozen=True)
class GraphUse:
    """One graph over the whole trace. asked, computed: tokens without and with padding; of prompts in prefill, of
    contexts in decode. seconds: of its replays. padding_s: the part of it that graphs of exactly the loads would
    save."""

    bucket: Bucket
    replays: int
    asked: float
    computed: float
    seconds: float
    padding_s: float
    full_s: float

    @property
    def padding(self) -> float:
        """Share of the computed tokens that is padding, 0 … 1."""
        return 1 - self.asked / self.computed if self.computed else 0.0


@dataclass(frozen=True)
class Outcome:
    """Result of a ladder on a trace. Times are in seconds, NaN for a request that was not served.

    ttft_s, total_s [N]: from the arrival to the first and to the last token. added_ttft_s, added_s [N]: the part that
    an ideal ladder, with a graph for exactly every shape, would save. low, high: outcomes with all costs at the lower
    or upper end of their intervals, None if these are unknown.
    """

    ladder: Ladder
    graphs: tuple[GraphUse, ...]
    loads: tuple[SimulatedLoad, ...]
    misses: tuple[BucketMiss, ...]
    num_misses: int
    split_prompts: int
    preemptions: int
    hit_rate: float
    guessing_steps: int
    drafted: int
    accepted: int
    span_s: float
    busy_s: float
    ttft_s: Floats
    total_s: Floats
    added_ttft_s: Floats
    added_s: Floats
    compile_s: float
    arena_bytes: int
    kv_bytes: int
    low: Outcome | None = None
    high: Outcome | None = None

    def range_of(self, value: Callable[[Outcome], float]) -> tuple[float, float] | None:
        """Range of a figure over the intervals of all costs; None if they are unknown."""
        if self.low is None or self.high is None:
            return None
        values = (value(self.low), value(self), value(self.high))
        return min(values), max(values)

    def of_phase(self, phase: str) -> list[GraphUse]:
        """The graphs of one phase."""
        return [use for use in self.graphs if use.bucket.phase == phase]

    @property
    def phases(self) -> list[str]:
        return [phase for phase in ("prefill", "mixed", "decode") if self.of_phase(phase)]

    @property
    def replays(self) -> int:
        return sum(use.replays for use in self.graphs)

    @property
    def seconds(self) -> float:
        """Seconds of all replays."""
        return sum(use.seconds for use in self.graphs)

    @property
    def padding_s(self) -> float:
        return sum(use.padding_s for use in self.graphs)

    def padded_tokens(self, phase: str) -> float:
        return sum(use.computed - use.asked for use in self.of_phase(phase))

    def padding(self, phase: str) -> float:
        """Share of a phase's computed tokens that is padding, 0 … 1."""
        computed = sum(use.computed for use in self.of_phase(phase))
        return self.padded_tokens(phase) / computed if computed else 0.0

    @property
    def uneven_contexts(self) -> float:
        """Share of decode (sequences × longest context) that the sequences' own contexts leave empty, 0 … 1. Steps in
        graphs for a total count as zero."""
        decode = {index: use.bucket for index, use in enumerate(self.graphs) if use.bucket.phase == "decode"}
        mine = [load for load in self.loads if load.graph in decode]
        rectangle = sum(load.contexts if decode[load.graph].total else load.num_seqs * load.longest for load in mine)
        return 1 - sum(load.contexts for load in mine) / rectangle if rectangle else 0.0

    @property
    def warm_up_s(self) -> float:
        """Seconds of one full replay of every graph."""
        return sum(use.full_s for use in self.graphs)

    @property
    def unserved(self) -> int:
        return int(np.count_nonzero(np.isnan(self.total_s)))

    @property
    def num_unused(self) -> int:
        return sum(1 for use in self.graphs if not use.replays)


def percentile(values: Floats, percent: float) -> float:
    """Percentile of the values that are numbers; 0 if there are none."""
    known = values[~np.isnan(values)]
    return float(np.percentile(known, percent)) if len(known) else 0.0


@dataclass
class WhatIf:
    """Tries ladders on one trace, one server and one set of costs. speed: factor by which arrivals come faster.
    pipeline: its stages; the costs are those of all of them together."""

    trace: Trace
    server: Server
    costs: StepCosts
    resources: Resources = field(default_factory=Resources)
    speed: float = 1.0
    pipeline: Pipeline = field(default_factory=Pipeline)

    def __post_init__(self) -> None:
        longest = self.server.max_model_len
        self.prompts = np.minimum(self.trace.prompt_tokens, longest - 1)
        # A request without output tokens still samples one before it ends.
        self.outputs = np.clip(self.trace.output_tokens, 1, longest - self.prompts)
        asked = self.trace.prompt_tokens + np.maximum(self.trace.output_tokens, 1)
        self.clipped = int(np.count_nonzero(asked > self.prompts + self.outputs))
        # Use the largest mixed bucket: its tokens decide how prompts are cut, which no ladder of exact shapes undoes.
        self._ideal: dict[Bucket | None, tuple[Floats, Floats]] = {}
        self._bounds: tuple[WhatIf, ...] | None = None

    def loads(self, ladder: Ladder, progress: OnProgress | None = None) -> tuple[SimulatedLoad, ...]:
        """Only the loads of the graphs. Raises as `run`."""
        return self.times(ladder, progress)[0]

    def times(
        self, ladder: Ladder, progress: OnProgress | None = None
    ) -> tuple[tuple[SimulatedLoad, ...], Floats, Floats]:
        """The loads of the graphs, and seconds from each arrival to the first and to the last token [N]; NaN for a
        request that was not served. Raises as `run`."""
        self.server.check(ladder)
        engine, ttft, total = self._simulate(self._graphs(ladder), ladder.name, progress)
        with engine:
            return tuple(engine.loads()), ttft, total

    def run(self, ladder: Ladder, progress: OnProgress | None = None) -> Outcome:
        """Raises BucketError if the ladder does not fit the server, LlmcError if the engine refuses."""
        outcome = self._run(ladder, progress)
        if not self.costs.bounds:
            return outcome
        if self._bounds is None:
            self._bounds = tuple(replace(self, costs=costs) for costs in (self.costs.low(), self.costs.high()))
        low, high = (what_if.run(ladder) for what_if in self._bounds)
        return replace(outcome, low=low, high=high)

    def _run(self, ladder: Ladder, progress: OnProgress | None) -> Outcome:
        self.server.check(ladder)
        mixed = max((b for b in ladder.buckets if b.phase == "mixed"), key=lambda b: b.max_tokens, default=None)
        if mixed not in self._ideal:
            self._ideal[mixed] = self._simulate(self._ideal_graphs(mixed), "ideal ladder", progress)[1:]
        ideal_ttft, ideal_total = self._ideal[mixed]
        engine, ttft, total = self._simulate(self._graphs(ladder), ladder.name, progress)
        with engine:
            loads, stats, misses = tuple(engine.loads()), engine.stats, tuple(engine.bucket_misses())
        largest = max(b.max_tokens for b in ladder.buckets if b.phase != "decode")
        rows = max(b.max_tokens for b in ladder.buckets)
        arena = ladder.arena_bytes
        if arena is None:
            arena = int(rows * self.resources.bytes_per_token)
        return Outcome(
            ladder=ladder,
            graphs=self._uses(ladder, loads),
            loads=loads,
            misses=misses,
            num_misses=stats.num_bucket_misses,
            split_prompts=int(np.count_nonzero(self.prompts > largest)),
            preemptions=stats.num_preemptions,
            hit_rate=stats.prefix_hit_tokens / max(stats.prefix_query_tokens, 1),
            guessing_steps=stats.num_speculative_steps,
            drafted=stats.drafted_tokens,
            accepted=stats.accepted_tokens,
            span_s=float(np.nanmax(self._arrival_s() + total, initial=0.0)),
            busy_s=sum(load.ns for load in loads) / 1e9
            + self.costs.step_s * stats.num_steps
            + self.costs.token_s * stats.output_tokens,
            ttft_s=ttft,
            total_s=total,
            added_ttft_s=ttft - ideal_ttft,
            added_s=total - ideal_total,
            compile_s=0.0 if ladder.path is not None else self.resources.compile_s(len(ladder.buckets)),
            arena_bytes=arena + len(ladder.buckets) * self.resources.bytes_per_graph,
            kv_bytes=stats.num_blocks * (self.server.kv_block_bytes if self.server.kv_block_bytes > 1 else 0)
            + stats.num_states * self.server.state_bytes,
        )

    def _arrival_s(self) -> Floats:
        return self.trace.arrival_s / self.speed

    def _simulate(
        self, graphs: Sequence[SimulatedGraph], name: str, progress: OnProgress | None
    ) -> tuple[SimulatedEngine, Floats, Floats]:
        server, trace = self.server, self.trace
        engine = SimulatedEngine(
            graphs,
            block_size=server.block_size,
            max_model_len=server.max_model_len,
            max_num_seqs=server.max_num_seqs,
            kv_block_bytes=server.kv_block_bytes,
            state_bytes=server.state_bytes,
            step_ns=self.costs.step_s * 1e9,
            token_ns=self.costs.token_s * 1e9,
            num_blocks=server.num_blocks,
            prefix_cache=server.prefix_cache,
            max_waiting=_WAITING,
            max_tokens_per_step=server.max_prefill_tokens,
            miss_policy="error" if server.strict else "larger",
            speculate_tokens=server.guesses,
            guess_odds=server.odds if server.guesses else 0.0,
            draft_ns=server.draft_s * 1e9 if server.guesses else 0.0,
            pipeline=self.pipeline,
        )
        arrival_ns = np.round(self._arrival_s() * 1e9).astype(np.uint64)
        shared = len(trace.prefix_ids) > 0
        first, last = engine.simulate(
            SimulatedTrace(
                arrival_ns,
                self.prompts.astype(np.uint32),
                self.outputs.astype(np.uint32),
                trace.prefix_start.astype(np.uint64) if shared else None,
                trace.prefix_ids if shared else None,
                trace.prefix_block,
            ),
            None if progress is None else lambda ended: progress(name, ended, len(trace)),
        )
        if progress is not None:
            progress(name, len(trace), len(trace))
        served = last > 0
        ttft, total = (np.where(served, at.astype(np.float64) - arrival_ns, np.nan) / 1e9 for at in (first, last))
        return engine, ttft, total

    def _graphs(self, ladder: Ladder) -> list[SimulatedGraph]:
        return [self._graph(bucket, ladder.tile(index)) for index, bucket in enumerate(ladder.buckets)]

    def _graph(self, bucket: Bucket, tile: int) -> SimulatedGraph:
        server = self.server
        # A decode graph reads whole blocks, and its cost is theirs.
        blocks = bucket.seq // server.block_size if bucket.total else 0
        whole = blocks * server.block_size or min(whole_blocks(bucket.seq, server.block_size), MAX_DIM)
        cost, exact = self.costs.curves(replace(bucket, seq=whole) if bucket.phase == "decode" else bucket, tile)
        sequences, longest = bucket.batch, whole if bucket.phase == "decode" else server.max_model_len
        return SimulatedGraph(
            phase=bucket.phase,
            batch=bucket.batch,
            seq=bucket.seq,
            max_tokens=bucket.max_tokens,
            max_seqs=sequences,
            max_samples=sequences,
            max_blocks_per_seq=-(-min(longest, server.max_model_len) // server.block_size),
            cost=_native(cost),
            exact=_native(exact),
            max_blocks=blocks,
        )

    def _ideal_graphs(self, mixed: Bucket | None) -> list[SimulatedGraph]:
        """One graph per phase that holds everything at exactly the cost of its load; mixed steps as large as in
        `mixed`."""
        server = self.server
        buckets = [
            Bucket("prefill", 1, server.max_model_len),
            Bucket("decode", server.max_num_seqs * (server.guesses + 1), server.max_model_len),
        ]
        graphs = []
        for bucket in buckets if mixed is None else [*buckets, mixed]:
            graph = self._graph(bucket, 1)
            batch = server.max_num_seqs if bucket.phase == "prefill" else bucket.batch
            graphs.append(replace(graph, batch=batch, max_seqs=batch, max_samples=batch, cost=graph.exact))
        return graphs

    def _uses(self, ladder: Ladder, loads: Sequence[SimulatedLoad]) -> tuple[GraphUse, ...]:
        uses = []
        for index, bucket in enumerate(ladder.buckets):
            mine = [load for load in loads if load.graph == index]
            replays = sum(load.replays for load in mine)
            asked = sum(asked_tokens(bucket, load) for load in mine)
            computed = replays * area(bucket, self.server.block_size)
            seconds, exact = (sum(getattr(load, name) for load in mine) / 1e9 for name in ("ns", "exact_ns"))
            uses.append(
                GraphUse(bucket, replays, asked, computed, seconds, seconds - exact, self.costs.seconds(bucket))
            )
        return tuple(uses)


def asked_tokens(bucket: Bucket, load: SimulatedLoad) -> int:
    """Tokens that the replays of a load request, in the unit of padding.

    Prefill: the true tokens of prompts. Decode: as many contexts as rows, each as long as the longest, because
    differences inside a batch are no fault of the ladder. A bucket for a total: the true contexts.
    """
    if bucket.total:
        return load.contexts
    return load.tokens * load.longest // load.replays if bucket.phase == "decode" else load.tokens


def _native(curve: CostCurve) -> Curve:
    return Curve(curve.rows, tuple(seconds * 1e9 for seconds in curve.seconds), curve.pair_s * 1e9)


def artifact_ladder(path: Path) -> tuple[Ladder, Server]:
    """The ladder of an artifact, and the server it was compiled for. Raises LlmcError and GraphsError."""
    from llmc.runtime.binding import Artifact
    from llmc.runtime.graphs_file import read_graphs

    with Artifact(path) as artifact:
        info, graphs = artifact.info, artifact.graphs()
    ladder = Ladder(
        name=path.resolve().name.removesuffix(".llmc"),
        buckets=tuple(graph.bucket for graph in graphs),
        source=str(path),
        path=path,
        row_units=tuple(graph.row_unit for graph in read_graphs(path).graphs),
        arena_bytes=info.max_arena_bytes,
    )
    server = Server(
        *(info.max_model_len, info.max_num_seqs, info.block_size, 0, info.kv_block_bytes),
        state_bytes=info.state_bytes,
    )
    return ladder, server
