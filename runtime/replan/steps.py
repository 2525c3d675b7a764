"""An engine's steps, misses and graphs, in the planner's form."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from llmc.buckets.bucket import MAX_DIM, Bucket, BucketError
from llmc.buckets.cost_table import CostTable
from llmc.buckets.replanning.candidates import rounded
from llmc.buckets.replanning.histogram import CountedSteps
from llmc.buckets.replanning.proposal import Ladder
from llmc.buckets.replanning.shapes import Limits, StepShape
from llmc.machine import PADDING
from llmc.runtime.binding import ArtifactInfo, GraphInfo
from llmc.runtime.binding.statistics import BucketMiss
from llmc.runtime.binding.statistics import StepShape as EngineSteps
from llmc.runtime.graphs_checks import FormatError
from llmc.runtime.graphs_file import read_graphs
from llmc.runtime.replan.trial import RanSteps
from llmc.runtime.warm_up.budget import COMMAND_BYTES
from llmc.runtime.warm_up.cost_tables import bucket_of, measured_table


class CountingEngine(Protocol):
    """The watched and controlled part of an engine; thread-safe."""

    def take_step_shapes(self) -> tuple[list[EngineSteps], int]: ...
    def bucket_misses(self) -> list[BucketMiss]: ...
    def enable_graph(self, graph: int, on: bool) -> None: ...
    def release_graph(self, graph: int) -> None: ...


@dataclass
class StepReader:
    """Reads steps since the previous call. graphs: the engine's, by index; may grow."""

    engine: CountingEngine
    graphs: Sequence[GraphInfo]
    block_size: int
    lost: int = 0
    """Steps that did not fit the engine's table."""

    def __post_init__(self) -> None:
        self._told: dict[BucketMiss, int] = {}

    def read(self) -> tuple[list[RanSteps], list[CountedSteps]]:
        """(steps that ran, steps that no graph held and that ran in parts)."""
        shapes, lost = self.engine.take_step_shapes()
        self.lost += lost
        ran = []
        for one in shapes:
            shape = StepShape(
                one.phase,
                one.num_seqs,
                one.num_tokens,
                one.num_samples,
                one.num_blocks * self.block_size,
                self._total(one.all_blocks),
            )
            seconds, squared = one.replay_ns / 1e9, one.replay_ns_squared / 1e18
            ran.append(RanSteps(shape, bucket_of(self.graphs[one.graph]), one.count, seconds, squared))
        return ran, self._missed()

    def _total(self, blocks: int) -> int:
        """Total of contexts in tokens, rounded up, so that shapes stay few: to a quarter of an octave, but not past the
        total of a bucket."""
        if not blocks:
            return 0
        total = blocks * self.block_size
        bounds = (graph.bucket.seq for graph in self.graphs if graph.bucket.total and graph.bucket.seq >= total)
        return min(rounded(total, self.block_size), min(bounds, default=MAX_DIM))

    def _missed(self) -> list[CountedSteps]:
        missed = []
        for miss in self.engine.bucket_misses():
            key = replace(miss, count=0)
            count, self._told[key] = miss.count - self._told.get(key, 0), miss.count
            # A miss that another graph ran whole is among the steps that ran.
            if count > 0 and miss.graph is None and miss.phase == "decode":
                context = miss.num_blocks * self.block_size
                shape = StepShape("decode", miss.num_seqs, miss.num_tokens, miss.num_seqs, context)
                missed.append(CountedSteps(shape, None, count))
        return missed


def counted(ran: Iterable[RanSteps]) -> list[CountedSteps]:
    """In the histogram's form."""
    return [CountedSteps(one.shape, one.bucket, one.count, one.seconds) for one in ran]


@dataclass(frozen=True)
class LadderFacts:
    """The constant facts of a served artifact. table: from `llmc warmup`; None if not measured."""

    limits: Limits
    table: CostTable | None
    tiles: Mapping[Bucket, int]
    padding: str = PADDING

    @classmethod
    def of_artifact(cls, path: Path, info: ArtifactInfo, max_num_seqs: int = 0) -> LadderFacts:
        """max_num_seqs: the server's; 0 for the artifact's."""
        limits = Limits(info.max_model_len, max_num_seqs or info.max_num_seqs, info.block_size)
        try:
            table: CostTable | None = measured_table(path)
        except BucketError:
            table = None
        try:
            tiles = {Bucket.parse(g.name): g.row_unit for g in read_graphs(path).graphs}
        except (FormatError, OSError):
            tiles = {}
        return cls(limits, table, tiles)

    def ladder(self, graphs: Sequence[GraphInfo], off: Iterable[int]) -> Ladder:
        """off: indices of graphs that steps do not use, but could."""
        idle = set(off)
        return Ladder(
            on=tuple(bucket_of(graph) for index, graph in enumerate(graphs) if index not in idle),
            limits=self.limits,
            off=tuple(bucket_of(graph) for index, graph in enumerate(graphs) if index in idle),
            padding=self.padding,
            arena_bytes={bucket_of(graph): graph.arena_bytes for graph in graphs},
            command_bytes={bucket_of(graph): graph.num_commands * COMMAND_BYTES for graph in graphs},
            tiles=self.tiles,
        )
