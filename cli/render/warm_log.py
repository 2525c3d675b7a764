"""Output of a start: the buckets of each phase, and after the warm-up the warm graphs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from llmc.graphs_format import PHASES
from llmc.runtime.warm_up.budget import graph_set_bytes
from llmc.units import format_bytes

if TYPE_CHECKING:
    from llmc.runtime.binding import GraphInfo
    from llmc.runtime.warm_up.warm_up import WarmStep

_SIZES = {"prefill": "batch x length", "decode": "batch x context", "mixed": "batch x tokens"}


def sizes(graphs: Sequence[GraphInfo]) -> str:
    """Buckets of one phase in short: batch x sizes, as in 1x128,256 2x128."""
    by_batch: dict[int, list[str]] = {}
    for graph in sorted(graphs, key=lambda g: (g.batch, g.seq)):
        by_batch.setdefault(graph.batch, []).append(graph.bucket.length)
    return " ".join(f"{batch}x{','.join(seqs)}" for batch, seqs in by_batch.items())


def bucket_lines(graphs: Sequence[GraphInfo]) -> list[str]:
    """The buckets, one line per phase."""
    lines = []
    for phase in PHASES:
        mine = [graph for graph in graphs if graph.phase == phase]
        if mine:
            lines.append(f"{phase} buckets: {len(mine)} ({_SIZES[phase]}) {sizes(mine)}")
    return lines


@dataclass
class WarmLog:
    """Collects the steps of a warm-up for a summary."""

    vocab_size: int
    steps: list[WarmStep] = field(default_factory=list)

    def take(self, step: WarmStep) -> None:
        """Records a graph that is warm."""
        self.steps.append(step)

    def lines(self) -> list[str]:
        """The warm graphs, one line per phase: count, time of their last replays or walks, memory, names."""
        lines = []
        for phase in PHASES:
            mine = [step for step in self.steps if step.graph.phase == phase]
            if not mine:
                continue
            replayed = sum(step.replayed for step in mine)
            graphs = [step.graph for step in mine]
            memory = format_bytes(graph_set_bytes(graphs, self.vocab_size))
            seconds = sum(step.wall_ns for step in mine) / 1e9
            lines.append(
                f"{phase} graphs warm: {len(mine)}, {replayed} replayed and {len(mine) - replayed} walked in "
                f"{seconds:.2f} s, {memory}: {sizes(graphs)}"
            )
        return lines
