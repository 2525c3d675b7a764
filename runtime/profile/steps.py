"""Manually driven steps: each sequence's new tokens and their start; no scheduler, no sampler."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llmc.graphs_records import Graph, Tables
    from llmc.runtime.binding import Replayer

Sequence = tuple[int, int]


@dataclass(frozen=True)
class Step:
    """sequences: (first new position, number of new tokens) of each; each samples its last token."""

    sequences: tuple[Sequence, ...]

    @property
    def num_tokens(self) -> int:
        return sum(count for _, count in self.sequences)

    @property
    def contexts(self) -> tuple[int, ...]:
        """Tokens of each sequence in the KV cache after the step."""
        return tuple(start + count for start, count in self.sequences)

    def num_blocks(self, block_size: int) -> int:
        """KV blocks that run() needs in the pool."""
        return len(self.sequences) * (-(-max(self.contexts) // block_size))

    def run(self, replayer: Replayer, graph: int, block_size: int, vocab_size: int, seed: int = 0) -> None:
        """Replays graph `graph` once on random token ids. Raises LlmcError if the step does not fit."""
        import numpy as np

        num_seqs, width = len(self.sequences), -(-max(self.contexts) // block_size)
        tables = np.arange(1, 1 + num_seqs * width, dtype=np.int32).reshape(num_seqs, width)
        positions = np.concatenate([np.arange(start, start + count) for start, count in self.sequences])
        rows = np.repeat(np.arange(num_seqs), [count for _, count in self.sequences])
        slots = tables[rows, positions // block_size] * block_size + positions % block_size
        ids = np.random.default_rng(seed).integers(0, vocab_size, positions.size)
        starts = np.concatenate([[0], np.cumsum([count for _, count in self.sequences])])
        states = replayer.own_slots(range(1, 1 + num_seqs))
        replayer.run(graph, ids, positions, slots, tables, np.asarray(self.contexts), starts, starts[1:] - 1, states)


def longest_context(tables: Tables, graph: Graph) -> int:
    """Most tokens of one sequence that `graph` can read."""
    return min(graph.max_blocks_per_seq * tables.model.block_size, tables.model.max_model_len)


def full_step(tables: Tables, graph: Graph, context: int | None = None) -> Step:
    """The step that fills `graph`. context: tokens cached after a decode step; by default the bucket's."""
    limit = longest_context(tables, graph)
    if graph.phase == 0:
        return Step(((0, min(graph.seq, limit)),) * graph.batch)
    share = graph.max_blocks // graph.batch * tables.model.block_size
    length = min(context or (share or graph.seq), limit, share or limit)
    if graph.phase == 1:
        return Step(((length - 1, 1),) * graph.batch)
    # Mixed: all sequences but one decode; the last has a prompt chunk.
    decodes = min(graph.batch, graph.max_seqs) - 1
    length = min(context or limit, limit)
    chunk = max(1, min(graph.seq, graph.max_tokens) - decodes)
    return Step((*(((length - 1, 1),) * decodes), (0, min(chunk, limit))))
