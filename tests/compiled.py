"""Shared by tests: compile a small model once a session, and drive its graphs by hand."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from llmc.compiler.config import CompileConfig
from llmc.compiler.pipeline import compile_model
from llmc.runtime.binding import Artifact, Replayer


def compile_tiny(model: Path, output: Path, cache: Path, **options: object) -> Artifact:
    """Compiles `model` for this machine into `output` and opens it."""
    config = CompileConfig(model=model, output=output, cache_dir=cache, **options)  # type: ignore[arg-type]
    compile_model(config)
    return Artifact(output)


@dataclass
class Pages:
    """Block tables of hand-driven sequences; blocks are handed out in a shuffled order."""

    num_blocks: int
    block_size: int
    seed: int = 0
    tables: dict[int, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        order = np.random.default_rng(self.seed).permutation(np.arange(1, self.num_blocks + 1))
        self._free = [int(b) for b in order]

    def slots(self, seq: int, positions: range) -> list[int]:
        """Slots of a sequence's positions; takes blocks as needed."""
        table = self.tables.setdefault(seq, [])
        while len(table) * self.block_size < positions.stop:
            table.append(self._free.pop())
        return [table[p // self.block_size] * self.block_size + p % self.block_size for p in positions]


def replay(replayer: Replayer, graph: int, pages: Pages, chunks: list[tuple[int, list[int], int]]) -> np.ndarray:
    """Runs (sequence, new tokens, first position) chunks ragged in one graph; logits of each one's last token."""
    ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    starts = [0]
    contexts = []
    for seq, tokens, start in chunks:
        span = range(start, start + len(tokens))
        ids += tokens
        positions += span
        slots += pages.slots(seq, span)
        starts.append(len(ids))
        contexts.append(span.stop)
    tables = [pages.tables[seq] for seq, _, _ in chunks]
    width = max(len(t) for t in tables)

    def ints(values: object) -> np.ndarray:
        return np.asarray(values, np.int32)

    return replayer.run(
        graph,
        ints(ids),
        ints(positions),
        ints(slots),
        ints([t + [0] * (width - len(t)) for t in tables]),
        ints(contexts),
        ints(starts),
        ints([s - 1 for s in starts[1:]]),
    )
